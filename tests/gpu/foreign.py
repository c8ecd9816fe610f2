#!/usr/bin/env python3
"""Builds programs of other projects with nvcc, and lays them out for `./run external`.

    foreign.py hecbench SOURCE OUT         each NAME-cuda of HeCBench, with the runs of its Makefile
    foreign.py library-samples SOURCE OUT  each program of NVIDIA's CUDALibrarySamples

SOURCE is a checkout, OUT a new folder. A program that does not build is reported and left out.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

# Data lie beside sources; these do not belong to a program's folder.
SOURCES = {".cu", ".cpp", ".c", ".cc", ".h", ".hpp", ".cuh", ".o", ".a", ".md", ".cmake"}
LIBRARIES = {
    "cuBLAS": ["cublas"],
    "cuBLASLt": ["cublasLt", "cublas"],
    "cuFFT": ["cufft", "nvrtc", "cuda"],
    "cuRAND": ["curand"],
    "cuSOLVER": ["cusolver", "cusolverMg", "cublas", "cusparse"],
    "cuSPARSE": ["cusparse", "cublas", "nvrtc", "nvJitLink", "cuda"],
    "nvJPEG": ["nvjpeg", "nppc", "nppig"],
    "NPP": ["nppc", "nppial", "nppicc", "nppidei", "nppif", "nppig", "nppim", "nppist", "nppisu", "nppitc", "npps"],
}


class Failed(Exception):
    """A program does not build."""


def call(command, folder, limit=240):
    """Runs a command; returns its output, or raises its first error."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{command[0]} took more than {limit} s") from error
    if done.returncode:
        lines = (done.stderr + done.stdout).splitlines()
        raise Failed(next((line for line in lines if re.search("error|undefined|cannot", line)), f"{command[0]} failed")[:160])
    return done.stdout


def is_built(path):
    """Returns True for machine code."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def place(program, data, folder):
    """Copies a program and its data to a folder of its own name."""
    folder.mkdir(parents=True)
    for path in data.rglob("*"):
        if path.is_file() and path.suffix not in SOURCES and "akefile" not in path.name and not is_built(path):
            target = folder / path.relative_to(data)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    shutil.copy(program, folder / folder.name)


def runs_of(makefile_output, folder):
    """Yields program and arguments of each line of `make -n run` that starts a built program."""
    for line in makefile_output.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(re.split(r"[;|>]|&&", line.strip().lstrip("@-"))[0])
        except ValueError:
            continue
        program = folder / words[0] if words and words[0].startswith("./") else None
        if program and program.is_file() and os.access(program, os.X_OK) and program.suffix not in (".sh", ".py"):
            # The program runs in a copy of its folder.
            yield program, [str((folder / word).resolve()) if word.startswith("../") else word for word in words[1:]]


def hecbench(folder, out, arch):
    """Builds one benchmark; returns its entries of programs.json."""
    name, entries = folder.name.removesuffix("-cuda"), {}
    made = ["make", f"ARCH={arch}", "LAUNCHER="]
    call([*made, "-s"], folder)
    for program, arguments in runs_of(call([*made, "-n", "run"], folder), folder):
        own = name if program.name in ("main", name) else f"{name}-{program.name}"
        if own not in entries:
            place(program, folder, out / own)
        entries.setdefault(own, {"software": "HeCBench", "runs": []})["runs"].append({"args": arguments})
    if not entries:
        raise Failed("its Makefile runs no program that was built")
    return entries


def library_sample(source, out, arch, root):
    """Builds one sample; returns its entry of programs.json."""
    relative = source.relative_to(root)
    name = "-".join([*relative.parts[:-1], source.stem])
    program = out / f".{name}"
    include = [source.parent, source.parent / "..", source.parent / "../utils", source.parent / "../../utils", root / relative.parts[0] / "utils"]
    libraries = [f"-l{library}" for library in LIBRARIES[relative.parts[0]]]
    flags = ["-O2", "-std=c++17", f"-arch={arch}", "-x", "cu", *(f"-I{folder}" for folder in include)]
    call(["nvcc", *flags, str(source), "-o", str(program), *libraries], source.parent)
    place(program, source.parent, out / name)
    program.unlink()
    return {name: {"software": f"CUDALibrarySamples {relative.parts[0]}"}}


def main():
    """Builds a suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["hecbench", "library-samples"])
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--arch", default="sm_90", help="of nvcc (default sm_90)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    source = args.source.resolve()
    if args.suite == "hecbench":
        found = sorted(folder for folder in source.glob("src/*-cuda") if (folder / "Makefile").is_file())
        build = lambda folder: hecbench(folder, args.out, args.arch)  # noqa: E731
    else:
        has_main = lambda path: re.search(r"\bmain\s*\(", path.read_text(errors="replace"))  # noqa: E731
        paths = (path for library in LIBRARIES for path in (source / library).rglob("*"))
        found = sorted(path for path in paths if path.suffix in (".cu", ".cpp", ".c") and has_main(path))
        build = lambda path: library_sample(path, args.out, args.arch, source)  # noqa: E731
    if not found:
        sys.exit(f"foreign.py: {source}: no program of {args.suite}; give the folder of a checkout")
    args.out.mkdir(parents=True)
    entries = {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for path, future in [(path, pool.submit(build, path)) for path in found]:
            try:
                entries.update(future.result())
            except Failed as error:
                print(f"{path.relative_to(source)}: not built: {error}")
    (args.out / "programs.json").write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{len(entries)} programs in {args.out}")
    if not entries:
        sys.exit("foreign.py: no program was built; the lines above have the compiler's errors")


if __name__ == "__main__":
    main()
