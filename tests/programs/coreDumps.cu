// Attributes of GPU core dumps: stored for the process and for a context. No dump is made.
#include "driver.h"

#include <cstring>
#include <string>
#include <unistd.h>

typedef void(CUDART_CB *Status)(void *, int, CUdevice);
typedef CUresult (*Register)(Status, void *, void **);
typedef CUresult (*Deregister)(void *);

static void CUDART_CB never(void *, int, CUdevice) { std::exit(7); }

// Calls of CUDA 13.2, which older drivers do not have.
static void callbacks() {
    auto start = reinterpret_cast<Register>(driver_symbol_if("cuCoredumpRegisterStartCallback"));
    auto complete = reinterpret_cast<Register>(driver_symbol_if("cuCoredumpRegisterCompleteCallback"));
    auto no_start = reinterpret_cast<Deregister>(driver_symbol_if("cuCoredumpDeregisterStartCallback"));
    auto no_complete = reinterpret_cast<Deregister>(driver_symbol_if("cuCoredumpDeregisterCompleteCallback"));
    if (start && complete && no_start && no_complete) {
        void *first = nullptr, *second = nullptr, *third = nullptr;
        CHECK_DRIVER(start(never, nullptr, &first));
        CHECK_DRIVER(start(never, nullptr, &second));
        CHECK_DRIVER(complete(never, nullptr, &third));
        EXPECT(first && second && third && first != second);
        EXPECT(start(nullptr, nullptr, &first) != CUDA_SUCCESS);
        EXPECT(no_start(third) != CUDA_SUCCESS);
        CHECK_DRIVER(no_start(first));
        CHECK_DRIVER(no_start(second));
        CHECK_DRIVER(no_complete(third));
        EXPECT(no_complete(third) != CUDA_SUCCESS);
    }
    std::printf("coreDumps: functions right\n");
}

int main() {
    CHECK(cudaFree(nullptr));
    DRIVER(cuCoredumpGetAttribute);
    DRIVER(cuCoredumpSetAttribute);
    DRIVER(cuCoredumpGetAttributeGlobal);
    DRIVER(cuCoredumpSetAttributeGlobal);
    char text[1024] = {};
    size_t size = sizeof text;
    CHECK_DRIVER(cuCoredumpGetAttributeGlobal_(CU_COREDUMP_FILE, text, &size));
    EXPECT(text[0] == 0);

    bool flag = true;
    size = sizeof flag;
    CHECK_DRIVER(cuCoredumpGetAttributeGlobal_(CU_COREDUMP_ENABLE_ON_EXCEPTION, &flag, &size));
    EXPECT(!flag);
    size = sizeof flag;
    CHECK_DRIVER(cuCoredumpGetAttribute_(CU_COREDUMP_TRIGGER_HOST, &flag, &size));
    EXPECT(flag);

    // A context's value precedes that of the process.
    char all[] = "dump-of-all", one[] = "dump-of-one";
    size = sizeof all;
    CHECK_DRIVER(cuCoredumpSetAttributeGlobal_(CU_COREDUMP_FILE, all, &size));
    size = sizeof one;
    CHECK_DRIVER(cuCoredumpSetAttribute_(CU_COREDUMP_FILE, one, &size));
    size = sizeof text;
    CHECK_DRIVER(cuCoredumpGetAttribute_(CU_COREDUMP_FILE, text, &size));
    EXPECT(std::strcmp(text, one) == 0);
    size = sizeof text;
    CHECK_DRIVER(cuCoredumpGetAttributeGlobal_(CU_COREDUMP_FILE, text, &size));
    EXPECT(std::strcmp(text, all) == 0);

    bool trigger = false;
    size = sizeof trigger;
    EXPECT(cuCoredumpSetAttribute_(CU_COREDUMP_ENABLE_USER_TRIGGER, &trigger, &size) != CUDA_SUCCESS);
    size = sizeof text;
    EXPECT(cuCoredumpGetAttribute_(CUcoredumpSettings(99), text, &size) != CUDA_SUCCESS);
    std::printf("coreDumps: attributes right\n");
    callbacks();
    return 0;
}
