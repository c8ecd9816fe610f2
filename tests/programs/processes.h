// Shared code of programs with several processes: children by fork and exec, and a socket to each.
#pragma once

#include "driver.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

// The other process of a pair.
struct Peer {
    int socket;
    pid_t pid;

    void put(const void *bytes, size_t count) const { EXPECT(write(socket, bytes, count) == ssize_t(count)); }

    void get(void *bytes, size_t count) const {
        for (size_t got = 0; got < count;) {
            ssize_t more = read(socket, static_cast<char *>(bytes) + got, count - got);
            EXPECT(more > 0);
            got += size_t(more);
        }
    }

    template <typename T> void send(const T &value) const { put(&value, sizeof value); }

    template <typename T> T receive() const {
        T value;
        get(&value, sizeof value);
        return value;
    }

    void tell() const { send('x'); }
    void hear() const { receive<char>(); }

    void send_descriptor(int descriptor) const {
        char byte = 'd', space[CMSG_SPACE(sizeof descriptor)] = {};
        iovec part = {&byte, 1};
        msghdr message = {};
        message.msg_iov = &part, message.msg_iovlen = 1;
        message.msg_control = space, message.msg_controllen = sizeof space;
        cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof descriptor);
        std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
        EXPECT(sendmsg(socket, &message, 0) == 1);
    }

    int receive_descriptor() const {
        char byte, space[CMSG_SPACE(sizeof(int))];
        iovec part = {&byte, 1};
        msghdr message = {};
        message.msg_iov = &part, message.msg_iovlen = 1;
        message.msg_control = space, message.msg_controllen = sizeof space;
        EXPECT(recvmsg(socket, &message, 0) == 1);
        EXPECT(CMSG_FIRSTHDR(&message) != nullptr);
        int descriptor;
        std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
        return descriptor;
    }

    // Waits until the process has ended, and returns its status.
    int end() const {
        int status = 0;
        EXPECT(waitpid(pid, &status, 0) == pid);
        close(socket);
        return status;
    }
};

// Starts this program once more; `work` names its part, and `peer` finds this process there.
static inline Peer start(const char *work) {
    int pair[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        std::string number = std::to_string(dup(pair[1]));
        execl("/proc/self/exe", "program", work, number.c_str(), nullptr);
        _exit(9);
    }
    close(pair[1]);
    return {pair[0], pid};
}

// The process that started this one with `start`.
static inline Peer parent(char **argv) { return {std::atoi(argv[2]), getppid()}; }

// Prints the name of a call's error, which has to be the driver's own.
#define SAY(what, call)                                                                                                \
    do {                                                                                                               \
        std::printf("%s: %s\n", what, cudaGetErrorName(call));                                                         \
        cudaGetLastError();                                                                                            \
        std::fflush(stdout);                                                                                           \
    } while (0)

// A stream that stands still until it is let go.
struct Stopped {
    cudaStream_t stream;
    unsigned *word;

    Stopped() {
        DRIVER(cuStreamWaitValue32);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaMalloc(&word, sizeof *word));
        CHECK(cudaMemset(word, 0, sizeof *word));
        CHECK(cudaDeviceSynchronize());
        CHECK_DRIVER(cuStreamWaitValue32_(stream, CUdeviceptr(word), 1, CU_STREAM_WAIT_VALUE_GEQ));
    }

    void let_go() const {
        DRIVER(cuStreamWriteValue32);
        cudaStream_t other;
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        CHECK_DRIVER(cuStreamWriteValue32_(other, CUdeviceptr(word), 1, 0));
        CHECK(cudaStreamSynchronize(other));
        CHECK(cudaStreamDestroy(other));
    }
};
