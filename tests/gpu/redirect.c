// Preloaded into a program: redirects its TCP connections to other ports, so that they pass through
// `link delay` unnoticed by program and server. LINK_REDIRECT=7601=7701,7602=7702
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static int other_port(int port) {
    const char *rules = getenv("LINK_REDIRECT");
    while (rules && *rules) {
        int from, to;
        if (sscanf(rules, "%d=%d", &from, &to) == 2 && from == port) return to;
        rules = strchr(rules, ',');
        if (rules) rules++;
    }
    return port;
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    static int (*original)(int, const struct sockaddr *, socklen_t);
    if (!original) *(void **)&original = dlsym(RTLD_NEXT, "connect");
    // The port has the same offset in both kinds of address.
    if (address && (address->sa_family == AF_INET || address->sa_family == AF_INET6) && length >= sizeof(struct sockaddr_in)) {
        struct sockaddr_storage copy;
        if (length <= sizeof copy) {
            memcpy(&copy, address, length);
            struct sockaddr_in *inet = (struct sockaddr_in *)&copy;
            inet->sin_port = htons((uint16_t)other_port(ntohs(inet->sin_port)));
            return original(fd, (struct sockaddr *)&copy, length);
        }
    }
    return original(fd, address, length);
}
