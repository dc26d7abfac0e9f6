"""Ranks that train with random unused sets and random delays for a long time, and agree to the bit.

python benchmarks/reducer_soak.py [--steps 5000] [--ranks 3] [--seed 0]
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from common import machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from parallel.test_reducer import random_steps
from ranks import run_ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    first, *others = run_ranks(random_steps, options.ranks, options.steps, options.seed, timeout=3600)
    equal = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    print(
        f"{machine()}\n{options.steps} steps on {options.ranks} ranks in {time.perf_counter() - start:.0f} s: ", end=""
    )
    print("equal to the bit" if equal else "DIFFERENT")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
