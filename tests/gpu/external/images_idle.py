"""cuda-python: more images than a worker keeps in memory, loaded again after they were idle."""

import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

driver, np = common.need("cuda.bindings.driver", "numpy")

COUNT = 24
COMMENT_BYTES = 5 << 20
# A worker forgets what was idle for 60 s, when it gets another image.
IDLE_SECONDS = 65
LAUNCH = (1, 1, 1, 32, 1, 1)
PTX = """.version 7.0
.target sm_70
.address_size 64
// %s
.visible .entry stamp(.param .u64 out)
{
    .reg .b64 %%rd<2>;
    .reg .b32 %%r<2>;
    ld.param.u64 %%rd1, [out];
    mov.u32 %%r1, %d;
    st.global.u32 [%%rd1], %%r1;
    ret;
}
"""


def must(answer):
    """Returns the result of a call that has to succeed."""
    code, *results = answer
    if int(code) != 0:
        raise RuntimeError(f"{type(code).__name__} {code.name}")
    return results[0] if results else None


def image(number):
    """Returns PTX with a long comment, so that no image is like another one."""
    words = np.random.default_rng(number).integers(97, 123, COMMENT_BYTES, dtype=np.uint8)
    return (PTX % (words.tobytes().decode(), number + 1000)).encode() + b"\0"


def stamps(images, memory, by_library):
    """Loads each image, launches its kernel and unloads it; returns the numbers of the kernels."""
    numbers = []
    for data in images:
        if by_library:
            library = must(driver.cuLibraryLoadData(data, [], [], 0, [], [], 0))
            kernel = driver.CUfunction(int(must(driver.cuLibraryGetKernel(library, b"stamp"))))
        else:
            module = must(driver.cuModuleLoadData(data))
            kernel = must(driver.cuModuleGetFunction(module, b"stamp"))
        must(driver.cuLaunchKernel(kernel, *LAUNCH, 0, 0, ((memory,), (None,)), 0))
        value = np.zeros(1, np.uint32)
        must(driver.cuMemcpyDtoH(value.ctypes.data, memory, 4))
        numbers.append(int(value[0]))
        must(driver.cuLibraryUnload(library) if by_library else driver.cuModuleUnload(module))
    return numbers


def main():
    """Loads all images, waits, and loads them again."""
    must(driver.cuInit(0))
    must(driver.cuCtxSetCurrent(must(driver.cuDevicePrimaryCtxRetain(must(driver.cuDeviceGet(0))))))
    memory = must(driver.cuMemAlloc(4))
    images = [image(number) for number in range(COUNT)]
    want = [number + 1000 for number in range(COUNT)]
    common.expect("first", stamps(images, memory, False) == want, "modules")
    time.sleep(IDLE_SECONDS)
    common.expect("a new one", stamps([image(COUNT)], memory, True) == [COUNT + 1000], "library")
    common.expect("after the wait", stamps(images, memory, True) == want, "libraries")
    common.expect("at once", stamps(images, memory, False) == want, "modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
