"""Fourier transforms (cuFFT) and their inverses: powers of two, a prime factor, two dimensions.

Prints checksums of the results.
"""

import common


def main():
    """Transforms, compares, prints."""
    import torch

    torch.manual_seed(1)
    for shape in ((64, 1024), (8, 1000), (4, 97, 128)):
        numbers = torch.randn(*shape, dtype=torch.complex64, device="cuda")
        there = torch.fft.fftn(numbers, dim=(-1,))
        back = torch.fft.ifft(there)
        wrong = float((back - numbers).abs().max())
        print(f"fft {shape}: {common.digest(torch.view_as_real(there))}, there and back {'good' if wrong < 1e-5 else wrong}")
    real = torch.fft.rfft2(torch.randn(16, 64, 48, device="cuda"))
    print(f"rfft2: {common.digest(torch.view_as_real(real))}")


if __name__ == "__main__":
    main()
