"""The benchmarks that no other test runs still run, at their smallest."""

import re

import pytest


@pytest.mark.slow
def test_loop_overhead(script):
    done = script("benchmarks/loop_overhead.py", "--rounds", "1", "--steps", "5", timeout=300)
    assert re.search(r"bare loop +[0-9.]+ ms per step\ntraining loop +[0-9.]+ ms per step \([+-]", done.stdout)


@pytest.mark.slow
def test_data_loading(script):
    flags = ["--num_steps", "5", "--num_items", "4", "--dataset_rows", "50"]
    done = script("benchmarks/data_loading.py", *flags, timeout=300)
    assert len(re.findall(r"^(?:Qwen|Wan).* [0-9.]+% ", done.stdout, re.MULTILINE)) == 12
    assert 'second start {"rows": 50' in done.stdout
