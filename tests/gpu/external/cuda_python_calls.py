"""cuda-python: driver calls, NVRTC, both linkers, graphs, memory pools, virtual memory."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import common  # noqa: E402

driver, nvrtc, np = common.need("cuda.bindings.driver", "cuda.bindings.nvrtc", "numpy")

SOURCE = b"""
extern "C" __global__ void scale(float* values, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] *= factor;
}
"""
CALLER = b"""
extern __device__ float changed(float x);
extern "C" __global__ void change(float* values, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] = changed(values[i]);
}
"""
CALLED = b"__device__ float changed(float x) { return 3 * x + 1; }"
COUNT = 10_000
BYTES = COUNT * 4
GRID = ((COUNT + 255) // 256, 1, 1, 256, 1, 1)


def must(answer):
    """Returns the results of a call that has to succeed."""
    code, *results = answer
    if int(code) != 0:
        raise RuntimeError(f"{type(code).__name__} {code.name}")
    return results[0] if len(results) == 1 else tuple(results)


def compile_ptx(source, *options):
    """Returns PTX of a source, made by NVRTC."""
    device = must(driver.cuCtxGetDevice())
    kinds = driver.CUdevice_attribute
    major, minor = (
        must(driver.cuDeviceGetAttribute(kind, device))
        for kind in (kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    )
    program = must(nvrtc.nvrtcCreateProgram(source, b"source.cu", 0, [], []))
    words = [f"--gpu-architecture=compute_{major}{minor}".encode(), *options]
    must(nvrtc.nvrtcCompileProgram(program, len(words), words))
    ptx = b" " * must(nvrtc.nvrtcGetPTXSize(program))
    must(nvrtc.nvrtcGetPTX(program, ptx))
    must(nvrtc.nvrtcDestroyProgram(program))
    return ptx, f"sm_{major}{minor}"


class Device:
    """Device memory with numbers, and the copies of them."""

    def __init__(self):
        self.host = np.arange(COUNT, dtype=np.float32)
        self.back = np.zeros_like(self.host)
        self.memory = must(driver.cuMemAlloc(BYTES))

    def fill(self):
        """Copies the numbers to the device."""
        must(driver.cuMemcpyHtoD(self.memory, self.host.ctypes.data, BYTES))

    def show(self, name, want):
        """Compares the numbers on the device."""
        must(driver.cuMemcpyDtoH(self.back.ctypes.data, self.memory, BYTES))
        common.expect(name, np.array_equal(self.back, want), common.digest_of_bytes(self.back.tobytes()))


def arguments(*pairs):
    """Returns values and their types, as a launch takes them."""
    return tuple(value for value, _ in pairs), tuple(kind for _, kind in pairs)


def scaling(data, factor):
    """Returns the arguments of the kernel `scale`."""
    import ctypes

    return arguments((data.memory, None), (factor, ctypes.c_float), (COUNT, ctypes.c_int))


def launches(data, kernel):
    """Launches by stream, with events."""
    stream = must(driver.cuStreamCreate(0))
    begin, end = must(driver.cuEventCreate(0)), must(driver.cuEventCreate(0))
    data.fill()
    must(driver.cuEventRecord(begin, stream))
    for _ in range(8):
        must(driver.cuLaunchKernel(kernel, *GRID, 0, stream, scaling(data, 2.0), 0))
    must(driver.cuEventRecord(end, stream))
    must(driver.cuEventSynchronize(end))
    common.expect("events", must(driver.cuEventElapsedTime(begin, end)) >= 0)
    data.show("launches", data.host * 256)
    return stream


def graphs(data, kernel, stream):
    """Captures launches, and builds a graph by hand; both are replayed."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    data.fill()
    must(driver.cuStreamBeginCapture(stream, mode))
    for _ in range(2):
        must(driver.cuLaunchKernel(kernel, *GRID, 0, stream, scaling(data, 3.0), 0))
    graph = must(driver.cuStreamEndCapture(stream))
    ready = must(driver.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        must(driver.cuGraphLaunch(ready, stream))
    must(driver.cuStreamSynchronize(stream))
    data.show("captured graph", data.host * 81)
    _, count = must(driver.cuGraphGetNodes(graph))
    common.expect("its nodes", count == 2, count)
    own = must(driver.cuGraphCreate(0))
    first = must(driver.cuGraphAddEmptyNode(own, [], 0))
    fill = driver.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = data.memory, 0x3F800000, 4, COUNT, 1
    must(driver.cuGraphAddMemsetNode(own, [first], 1, fill, must(driver.cuCtxGetCurrent())))
    ready = must(driver.cuGraphInstantiate(own, 0))
    must(driver.cuGraphLaunch(ready, stream))
    must(driver.cuStreamSynchronize(stream))
    data.show("graph by hand", np.ones(COUNT, np.float32))


def linked(data, image, name):
    """Runs the kernel `change` of an image of two linked sources."""
    import ctypes

    module = must(driver.cuModuleLoadData(image))
    kernel = must(driver.cuModuleGetFunction(module, b"change"))
    data.fill()
    must(driver.cuLaunchKernel(kernel, *GRID, 0, 0, arguments((data.memory, None), (COUNT, ctypes.c_int)), 0))
    must(driver.cuCtxSynchronize())
    data.show(name, 3 * data.host + 1)
    must(driver.cuModuleUnload(module))


def linkers(data):
    """Links two sources by the driver, and by nvJitLink."""
    parts = [compile_ptx(source, b"-rdc=true") for source in (CALLER, CALLED)]
    state = must(driver.cuLinkCreate(0, [], []))
    for number, (ptx, _) in enumerate(parts):
        kind = driver.CUjitInputType.CU_JIT_INPUT_PTX
        must(driver.cuLinkAddData(state, kind, ptx, len(ptx), b"part%d" % number, 0, [], []))
    image, size = must(driver.cuLinkComplete(state))
    common.expect("cuLinkComplete", size > 0)
    linked(data, image, "linked by the driver")
    must(driver.cuLinkDestroy(state))
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except Exception as error:
        common.measure("nvjitlink", f"{type(error).__name__}: {error}", "missing")
        return
    handle = nvjitlink.create(1, [f"-arch={parts[0][1]}"])
    for number, (ptx, _) in enumerate(parts):
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx, len(ptx), f"part{number}")
    nvjitlink.complete(handle)
    cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
    nvjitlink.get_linked_cubin(handle, cubin)
    nvjitlink.destroy(handle)
    linked(data, bytes(cubin), "linked by nvJitLink")


def memory(data, kernel, stream):
    """Uses stream-ordered and virtual memory, and fills of all widths."""
    device = must(driver.cuCtxGetDevice())
    block = must(driver.cuMemAllocAsync(BYTES, stream))
    must(driver.cuMemsetD32Async(block, 7, COUNT, stream))
    must(driver.cuMemcpyDtoDAsync(data.memory, block, BYTES, stream))
    must(driver.cuMemFreeAsync(block, stream))
    must(driver.cuStreamSynchronize(stream))
    data.show("cuMemAllocAsync", np.full(COUNT, 7, np.int32).view(np.float32))
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(device)
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = must(driver.cuMemGetAllocationGranularity(properties, least))
    address = must(driver.cuMemAddressReserve(2 * size, 0, 0, 0))
    handle = must(driver.cuMemCreate(size, properties, 0))
    must(driver.cuMemMap(address, size, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    must(driver.cuMemSetAccess(address, size, [access], 1))
    must(driver.cuMemcpyHtoD(address, data.host.ctypes.data, BYTES))
    must(driver.cuMemcpyDtoD(data.memory, address, BYTES))
    data.show("virtual memory", data.host)
    must(driver.cuMemUnmap(address, size))
    must(driver.cuMemRelease(handle))
    must(driver.cuMemAddressFree(address, 2 * size))
    refused = driver.cuMemAlloc(1 << 46)[0]
    common.expect("out of memory", refused == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, refused.name)
    wrong = driver.cuMemFree(12345)[0]
    common.expect("wrong address", wrong == driver.CUresult.CUDA_ERROR_INVALID_VALUE, wrong.name)


def main():
    """Runs all parts."""
    import cuda.bindings

    common.measure("version", cuda.bindings.__version__, "cuda-python")
    must(driver.cuInit(0))
    device = must(driver.cuDeviceGet(0))
    print("device", must(driver.cuDeviceGetName(64, device)).split(b"\0")[0].decode())
    must(driver.cuCtxSetCurrent(must(driver.cuDevicePrimaryCtxRetain(device))))
    ptx, _ = compile_ptx(SOURCE)
    library = must(driver.cuLibraryLoadData(ptx, [], [], 0, [], [], 0))
    must(driver.cuLibraryGetKernel(library, b"scale"))
    module = must(driver.cuModuleLoadData(ptx))
    kernel = must(driver.cuModuleGetFunction(module, b"scale"))
    blocks = must(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, 256, 0))
    common.expect("occupancy", blocks > 0, blocks)
    data = Device()
    stream = launches(data, kernel)
    graphs(data, kernel, stream)
    linkers(data)
    memory(data, kernel, stream)
    return 0


if __name__ == "__main__":
    sys.exit(main())
