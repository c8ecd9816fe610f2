// The driver's linker: PTX from memory and from a file becomes one image, which loads and runs;
// logs, missing symbols, invalid input, codes of wrong calls.
#include "driver.h"

#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

static const char HEAD[] = ".version 6.3\n.target sm_75\n.address_size 64\n";

// out[i] = twice(i) + offset, where `twice` and `offset` are in other inputs.
static const char KERNEL[] = R"(
.extern .func (.param .u32 result) twice(.param .u32 value);
.extern .global .align 4 .u32 offset_of_all;
.visible .entry fill(.param .u64 out, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %r<8>;
    .reg .b64 %a<4>;
    ld.param.u64 %a1, [out];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1;
    @%p bra DONE;
    {
        .param .u32 value;
        .param .u32 result;
        st.param.u32 [value], %r5;
        call.uni (result), twice, (value);
        ld.param.u32 %r6, [result];
    }
    ld.global.u32 %r7, [offset_of_all];
    add.u32 %r6, %r6, %r7;
    cvta.to.global.u64 %a1, %a1;
    mul.wide.u32 %a2, %r5, 4;
    add.u64 %a1, %a1, %a2;
    st.global.u32 [%a1], %r6;
DONE:
    ret;
}
)";

static const char TWICE[] = R"(
.visible .func (.param .u32 result) twice(.param .u32 value)
{
    .reg .b32 %r<3>;
    ld.param.u32 %r1, [value];
    add.u32 %r2, %r1, %r1;
    st.param.u32 [result], %r2;
    ret;
}
)";

static const char OFFSET[] = ".visible .global .align 4 .u32 offset_of_all = 5000;\n";

const unsigned COUNT = 1000;

struct Logs {
    char info[4096], error[4096];
    std::vector<CUjit_option> keys;
    std::vector<void *> values;
    Logs() : info(), error() {
        keys = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
                CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_LOG_VERBOSE};
        values = {info, reinterpret_cast<void *>(sizeof info), error, reinterpret_cast<void *>(sizeof error),
                  reinterpret_cast<void *>(1)};
    }
    // The sizes are those of the messages, with or without the terminator.
    void check_sizes() const {
        for (int i : {1, 3}) {
            const size_t length = std::strlen(static_cast<const char *>(values[i - 1]));
            const size_t filled = reinterpret_cast<size_t>(values[i]);
            EXPECT(filled == length || filled == length + 1);
        }
    }
};

static std::string with_head(const char *code) { return std::string(HEAD) + code; }

int main() {
    CHECK(cudaFree(nullptr));
    DRIVER(cuLinkCreate);
    DRIVER(cuLinkAddData);
    DRIVER(cuLinkAddFile);
    DRIVER(cuLinkComplete);
    DRIVER(cuLinkDestroy);
    DRIVER(cuModuleLoadData);
    DRIVER(cuModuleGetFunction);
    DRIVER(cuModuleUnload);
    DRIVER(cuLaunchKernel);

    const std::string kernel = with_head(KERNEL), twice = with_head(TWICE), offset = with_head(OFFSET);
    char path[] = "/tmp/linker-XXXXXX";
    int file = mkstemp(path);
    EXPECT(file >= 0);
    EXPECT(write(file, offset.c_str(), offset.size()) == static_cast<ssize_t>(offset.size()));
    EXPECT(close(file) == 0);

    Logs logs;
    CUlinkState link;
    CHECK_DRIVER(cuLinkCreate_(5, logs.keys.data(), logs.values.data(), &link));
    CHECK_DRIVER(cuLinkAddData_(link, CU_JIT_INPUT_PTX, const_cast<char *>(kernel.c_str()), kernel.size() + 1, "kernel.ptx", 0, nullptr, nullptr));
    CHECK_DRIVER(cuLinkAddData_(link, CU_JIT_INPUT_PTX, const_cast<char *>(twice.c_str()), twice.size() + 1, "twice.ptx", 0, nullptr, nullptr));
    CHECK_DRIVER(cuLinkAddFile_(link, CU_JIT_INPUT_PTX, path, 0, nullptr, nullptr));
    void *image = nullptr;
    size_t size = 0;
    CHECK_DRIVER(cuLinkComplete_(link, &image, &size));
    EXPECT(image != nullptr && size > 0);
    EXPECT(logs.error[0] == 0);
    logs.check_sizes();
    std::printf("linker: linked\n");

    // The image belongs to the state; loading it leaves it as it is.
    const std::string copy(static_cast<char *>(image), size);
    CUmodule module, again;
    CUfunction fill;
    CHECK_DRIVER(cuModuleLoadData_(&module, image));
    EXPECT(std::memcmp(copy.data(), image, size) == 0);
    CHECK_DRIVER(cuLinkDestroy_(link));
    CHECK_DRIVER(cuModuleGetFunction_(&fill, module, "fill"));
    unsigned *out;
    unsigned count = COUNT;
    CHECK(cudaMalloc(&out, COUNT * sizeof *out));
    void *arguments[] = {&out, &count};
    CHECK_DRIVER(cuLaunchKernel_(fill, (COUNT + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
    std::vector<unsigned> host(COUNT);
    CHECK(cudaMemcpy(host.data(), out, COUNT * sizeof *out, cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < COUNT; i++) EXPECT(host[i] == 2 * i + 5000);
    CHECK_DRIVER(cuModuleUnload_(module));
    // A copy of the image outlives the state.
    CHECK_DRIVER(cuModuleLoadData_(&again, copy.data()));
    CHECK_DRIVER(cuModuleGetFunction_(&fill, again, "fill"));
    CHECK(cudaMemset(out, 0, COUNT * sizeof *out));
    CHECK_DRIVER(cuLaunchKernel_(fill, (COUNT + 127) / 128, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
    CHECK(cudaMemcpy(host.data(), out, COUNT * sizeof *out, cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < COUNT; i++) EXPECT(host[i] == 2 * i + 5000);
    CHECK_DRIVER(cuModuleUnload_(again));
    std::printf("linker: the linked image runs\n");

    // A symbol that no input defines.
    Logs missing;
    CHECK_DRIVER(cuLinkCreate_(5, missing.keys.data(), missing.values.data(), &link));
    CHECK_DRIVER(cuLinkAddData_(link, CU_JIT_INPUT_PTX, const_cast<char *>(kernel.c_str()), kernel.size() + 1, "kernel.ptx", 0, nullptr, nullptr));
    image = nullptr;
    EXPECT(cuLinkComplete_(link, &image, &size) != CUDA_SUCCESS);
    EXPECT(missing.error[0] != 0);
    missing.check_sizes();
    CHECK_DRIVER(cuLinkDestroy_(link));
    std::printf("linker: a missing symbol is an error with a log\n");

    // Text that is no PTX.
    Logs invalid;
    static char nonsense[] = ".version 6.3\n.target sm_75\n.address_size 64\nthis is no instruction\n";
    CHECK_DRIVER(cuLinkCreate_(5, invalid.keys.data(), invalid.values.data(), &link));
    SHOW_DRIVER(cuLinkAddData_(link, CU_JIT_INPUT_PTX, nonsense, sizeof nonsense, nullptr, 0, nullptr, nullptr));
    EXPECT(invalid.error[0] != 0);
    SHOW_DRIVER(cuLinkAddData_(link, CU_JIT_INPUT_PTX, nullptr, 10, nullptr, 0, nullptr, nullptr));
    SHOW_DRIVER(cuLinkAddFile_(link, CU_JIT_INPUT_PTX, "/nonexistent/input.ptx", 0, nullptr, nullptr));
    CHECK_DRIVER(cuLinkDestroy_(link));
    SHOW_DRIVER(cuLinkCreate_(0, nullptr, nullptr, nullptr));
    CHECK(cudaFree(out));
    EXPECT(unlink(path) == 0);
    return 0;
}
