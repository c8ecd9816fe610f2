"""Matrix products in fp32, TF32, fp16 and bf16, compared with the host, printed as checksums."""

import common


def main():
    """Multiplies several shapes, including odd ones, and a batch."""
    import torch

    print("device", torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    generator = torch.Generator().manual_seed(5)
    kinds = [
        ("fp32", torch.float32, False, 1e-4),
        ("tf32", torch.float32, True, 2e-2),
        ("fp16", torch.float16, False, 2e-2),
        ("bf16", torch.bfloat16, False, 1e-1),
    ]
    for name, dtype, tf32, tolerance in kinds:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for rows, inner, columns in ((1024, 1024, 1024), (333, 77, 501), (8, 4096, 64)):
            a = torch.randn(rows, inner, generator=generator).to(dtype)
            b = torch.randn(inner, columns, generator=generator).to(dtype)
            c = a.cuda() @ b.cuda()
            expected = a.double() @ b.double()
            error = ((c.double().cpu() - expected).abs().max() / inner**0.5).item()
            print(f"{name} {rows}x{inner}x{columns} {common.digest(c)} {'right' if error < tolerance else f'WRONG by {error}'}")
    a = torch.randn(16, 64, 128, generator=generator).half().cuda()
    b = torch.randn(16, 128, 32, generator=generator).half().cuda()
    print("batched", common.digest(torch.bmm(a, b)))
    x = torch.randn(1000, generator=generator).cuda()
    print("sort", common.digest(x.sort()[0]), "sum", common.digest(x.double().sum()), "norm", common.digest(torch.softmax(x, 0)))
    torch.cuda.manual_seed(11)
    print("random", common.digest(torch.rand(10000, device="cuda")), common.digest(torch.randn(10001, device="cuda")))
    print("convolution", common.digest(torch.nn.functional.conv2d(x[:972].view(1, 3, 18, 18), x[:135].view(5, 3, 3, 3))))
    print("fft", common.digest(torch.view_as_real(torch.fft.fft(x[:512].double()))))
    print("solve", common.digest(torch.linalg.solve(torch.eye(20, device="cuda") * 2 + x[:400].view(20, 20) * 0.01, x[:20])))


if __name__ == "__main__":
    main()
