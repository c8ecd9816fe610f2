// Measures the link that remote calls use, and adds delay to it by a proxy.
//
//   link measure [SECONDS]    measures the loopback round trip of 64 bytes (TCP and Unix, spinning
//                             and blocking) and bulk copies with 1, 2 and 4 streams; prints one
//                             JSON object per line
//   link delay LISTEN_PORT HOST:PORT USEC
//                             forwards TCP connections, and adds USEC to the round trip, half in
//                             each direction
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    fprintf(stderr, "link: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static int listen_on(int port, int *chosen) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0) die("socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 64)) die("listen");
    if (chosen) {
        getsockname(fd, (struct sockaddr *)&address, &length);
        *chosen = ntohs(address.sin_port);
    }
    return fd;
}

static int connect_to(const char *host, int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (fd < 0 || inet_pton(AF_INET, host, &address.sin_addr) != 1) return -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) {
        close(fd);
        return -1;
    }
    no_delay(fd);
    return fd;
}

// Creates two connected sockets.
static void make_pair(int tcp, int pair[2]) {
    if (!tcp) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) die("socketpair");
        return;
    }
    int port, listener = listen_on(0, &port);
    pair[0] = connect_to("127.0.0.1", port);
    if (pair[0] < 0) die("connect");
    pair[1] = accept(listener, NULL, NULL);
    if (pair[1] < 0) die("accept");
    no_delay(pair[1]);
    close(listener);
}

// Reads exactly `size` bytes; a spinning reader never sleeps in the kernel. Returns 0 at the end of
// the stream.
static int read_all(int fd, char *data, size_t size, int spin) {
    for (size_t have = 0; have < size;) {
        ssize_t got = recv(fd, data + have, size - have, spin ? MSG_DONTWAIT : 0);
        if (got > 0)
            have += (size_t)got;
        else if (got == 0)
            return 0;
        else if (errno != EAGAIN && errno != EINTR)
            return 0;
    }
    return 1;
}

static int write_all(int fd, const char *data, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t sent = send(fd, data + done, size - done, MSG_NOSIGNAL);
        if (sent > 0)
            done += (size_t)sent;
        else if (errno != EINTR)
            return 0;
    }
    return 1;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void round_trip(int tcp, int spin, double seconds) {
    int pair[2];
    make_pair(tcp, pair);
    char message[64] = {0};
    pid_t child = fork();
    if (child < 0) die("fork");
    if (child == 0) {
        close(pair[0]);
        while (read_all(pair[1], message, sizeof message, spin) && write_all(pair[1], message, sizeof message)) {
        }
        _exit(0);
    }
    close(pair[1]);
    enum { MOST = 400000 };
    double *taken = malloc(MOST * sizeof *taken);
    int count = 0;
    for (int i = 0; i < 2000; i++)
        if (!write_all(pair[0], message, sizeof message) || !read_all(pair[0], message, sizeof message, spin)) die("echo");
    for (double end = now() + seconds; count < MOST && now() < end; count++) {
        double start = now();
        if (!write_all(pair[0], message, sizeof message) || !read_all(pair[0], message, sizeof message, spin)) die("echo");
        taken[count] = now() - start;
    }
    close(pair[0]);
    waitpid(child, NULL, 0);
    qsort(taken, (size_t)count, sizeof *taken, compare);
    printf("{\"name\": \"link_rtt_%s_%s\", \"value\": %.3f, \"unit\": \"us\"}\n", tcp ? "tcp" : "unix",
           spin ? "spinning" : "blocking", taken[count / 2] * 1e6);
    fflush(stdout);
    free(taken);
}

enum { CHUNK = 1 << 20 };

static void *sender(void *argument) {
    int fd = *(int *)argument;
    char *data = malloc(CHUNK);
    memset(data, 7, CHUNK);
    while (write_all(fd, data, CHUNK)) {
    }
    free(data);
    return NULL;
}

struct receiver {
    int fd;
    double end;
    uint64_t bytes;
};

static void *receive(void *argument) {
    struct receiver *self = argument;
    char *data = malloc(CHUNK);
    memset(data, 0, CHUNK);
    while (now() < self->end) {
        ssize_t got = recv(self->fd, data, CHUNK, 0);
        if (got <= 0) break;
        self->bytes += (uint64_t)got;
    }
    free(data);
    return NULL;
}

// Forks a process that sends, since a real sender is another process, too.
static void bulk(int tcp, int streams, double seconds) {
    int pairs[8][2];
    for (int i = 0; i < streams; i++) make_pair(tcp, pairs[i]);
    pid_t child = fork();
    if (child < 0) die("fork");
    if (child == 0) {
        pthread_t threads[8];
        for (int i = 0; i < streams; i++) close(pairs[i][0]);
        for (int i = 0; i < streams; i++) pthread_create(&threads[i], NULL, sender, &pairs[i][1]);
        for (int i = 0; i < streams; i++) pthread_join(threads[i], NULL);
        _exit(0);
    }
    struct receiver receivers[8];
    pthread_t threads[8];
    double start = now();
    for (int i = 0; i < streams; i++) {
        close(pairs[i][1]);
        receivers[i] = (struct receiver){.fd = pairs[i][0], .end = start + seconds};
        pthread_create(&threads[i], NULL, receive, &receivers[i]);
    }
    uint64_t total = 0;
    for (int i = 0; i < streams; i++) {
        pthread_join(threads[i], NULL);
        total += receivers[i].bytes;
    }
    double taken = now() - start;
    for (int i = 0; i < streams; i++) close(pairs[i][0]);
    waitpid(child, NULL, 0);
    printf("{\"name\": \"link_bulk_%s_%d\", \"value\": %.3f, \"unit\": \"GB/s\"}\n", tcp ? "tcp" : "unix", streams,
           (double)total / taken * 1e-9);
    fflush(stdout);
}

// ---- the proxy ----

static double one_way;
static char target_host[64];
static int target_port;

struct piece {
    double due;
    size_t size;
    struct piece *next;
    char data[];
};

// One direction of one connection: a reader stamps each piece, and a writer sends it when it is
// due.
struct direction {
    int from, to;
    struct connection *owner;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct piece *first, **last;
    size_t held;
    int ended;
};

struct connection {
    struct direction ways[2];
    int left;
    pthread_mutex_t mutex;
};

static void leave(struct connection *c) {
    pthread_mutex_lock(&c->mutex);
    int left = --c->left;
    pthread_mutex_unlock(&c->mutex);
    if (left == 0) {
        close(c->ways[0].from);
        close(c->ways[0].to);
        free(c);
    }
}

static void *delay_reader(void *argument) {
    struct direction *d = argument;
    const size_t most = 256 << 10, window = (size_t)256 << 20;
    for (;;) {
        struct piece *piece = malloc(sizeof *piece + most);
        ssize_t got = recv(d->from, piece->data, most, 0);
        piece->due = now() + one_way;
        piece->next = NULL;
        pthread_mutex_lock(&d->mutex);
        if (got <= 0) {
            free(piece);
            d->ended = 1;
            pthread_cond_broadcast(&d->changed);
            pthread_mutex_unlock(&d->mutex);
            break;
        }
        piece->size = (size_t)got;
        *d->last = piece;
        d->last = &piece->next;
        d->held += piece->size;
        pthread_cond_broadcast(&d->changed);
        while (d->held > window && !d->ended) pthread_cond_wait(&d->changed, &d->mutex);
        pthread_mutex_unlock(&d->mutex);
    }
    leave(d->owner);
    return NULL;
}

static void *delay_writer(void *argument) {
    struct direction *d = argument;
    for (;;) {
        pthread_mutex_lock(&d->mutex);
        while (!d->first && !d->ended) pthread_cond_wait(&d->changed, &d->mutex);
        struct piece *piece = d->first;
        pthread_mutex_unlock(&d->mutex);
        if (!piece) break;
        // A sleep is inaccurate by tens of microseconds, so the last part of the wait spins.
        double left = piece->due - now();
        if (left > 200e-6) {
            struct timespec t = {0, (long)((left - 150e-6) * 1e9)};
            nanosleep(&t, NULL);
        }
        while (now() < piece->due) {
        }
        int sent = write_all(d->to, piece->data, piece->size);
        pthread_mutex_lock(&d->mutex);
        d->first = piece->next;
        if (!d->first) d->last = &d->first;
        d->held -= piece->size;
        if (!sent) d->ended = 1;
        pthread_cond_broadcast(&d->changed);
        pthread_mutex_unlock(&d->mutex);
        free(piece);
        if (!sent) {
            shutdown(d->from, SHUT_RD);
            break;
        }
    }
    shutdown(d->to, SHUT_WR);
    leave(d->owner);
    return NULL;
}

static void proxy(int port) {
    int listener = listen_on(port, NULL);
    printf("listening\n");
    fflush(stdout);
    for (;;) {
        int client = accept(listener, NULL, NULL);
        if (client < 0) continue;
        no_delay(client);
        int server = connect_to(target_host, target_port);
        if (server < 0) {
            close(client);
            continue;
        }
        struct connection *c = calloc(1, sizeof *c);
        pthread_mutex_init(&c->mutex, NULL);
        c->left = 4;
        for (int i = 0; i < 2; i++) {
            struct direction *d = &c->ways[i];
            d->from = i ? server : client;
            d->to = i ? client : server;
            d->owner = c;
            d->last = &d->first;
            pthread_mutex_init(&d->mutex, NULL);
            pthread_cond_init(&d->changed, NULL);
        }
        for (int i = 0; i < 2; i++) {
            pthread_t thread;
            pthread_create(&thread, NULL, delay_reader, &c->ways[i]);
            pthread_detach(thread);
            pthread_create(&thread, NULL, delay_writer, &c->ways[i]);
            pthread_detach(thread);
        }
    }
}

int main(int count, char **words) {
    signal(SIGPIPE, SIG_IGN);
    if (count >= 2 && strcmp(words[1], "measure") == 0) {
        double seconds = count > 2 ? atof(words[2]) : 1.0;
        for (int tcp = 1; tcp >= 0; tcp--)
            for (int spin = 1; spin >= 0; spin--) round_trip(tcp, spin, seconds / 2);
        for (int tcp = 1; tcp >= 0; tcp--)
            for (int streams = 1; streams <= 4; streams *= 2) bulk(tcp, streams, seconds);
        return 0;
    }
    if (count == 5 && strcmp(words[1], "delay") == 0) {
        char *colon = strrchr(words[3], ':');
        if (colon && (size_t)(colon - words[3]) < sizeof target_host) {
            memcpy(target_host, words[3], (size_t)(colon - words[3]));
            target_port = atoi(colon + 1);
            one_way = atof(words[4]) * 1e-6 / 2;
            proxy(atoi(words[2]));
        }
    }
    fprintf(stderr, "usage: link measure [SECONDS] | link delay LISTEN_PORT HOST:PORT USEC\n");
    return 64;
}
