"""What README.md, docs/ and CONTRIBUTING.md state is true, and in plain English."""

import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks.forecasts import GIB, describe_size, gpu_table


ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
NAMES = [path.relative_to(ROOT) for path in PAGES]


def tree():
    """Return the lines of the tree in the README with the folder that each is about, and the names in them."""
    lines = re.search(r"## Where things are\n\n```\n(.*?)```", README, re.DOTALL)[1].splitlines()
    folder = ""
    for line in lines:
        if re.match(r"\S+/ ", line):
            folder = line.split()[0]
        elif re.match(r"\S", line):
            folder = ""
        yield folder, line


def test_every_file_in_the_tree_exists_and_every_folder_is_named():
    named, missing = set(), []
    for folder, line in tree():
        named |= set(re.findall(r"\b(\w+)/", line))
        for name in re.findall(r"\b(?<!\.)\w+\.(?:py|sh|yaml|md)\b", line):
            if not (ROOT / folder / name).is_file():
                missing.append(f"{folder}{name}")
    assert missing == []
    command = ["git", "ls-files", "-z", "*/*"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    folders = {parent for name in files if name for parent in pathlib.Path(name).parent.parts}
    assert {name for name in folders if not name.startswith(".")} - named == set()


def test_the_front_page_stays_short():
    assert len(README.splitlines()) <= 130


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / name).parent.joinpath(link).exists()] == []


def test_the_table_of_gpus_follows_from_the_page_of_memory():
    rows = {}
    for line in (ROOT / "docs" / "memory.md").read_text().splitlines():
        if line.startswith(("| lora/", "| full/")):
            label, *cells = line.strip("| ").split(" | ")
            keys = ("keep", "recompute", "park", "parked", "others")
            rows[label] = {key: float(cell) * GIB for key, cell in zip(keys, cells, strict=False)}
    lines = gpu_table(lambda name, size, mode: rows[f"{mode}/{name}, {describe_size(size)}"])
    assert "\n".join(lines) in README


def test_the_front_image_is_small():
    assert (ROOT / "docs" / "demo.jpg").stat().st_size < 150_000


# ---------------------------------------------------------------- plain English


# Words of the glossary's last column that have no second meaning here.
BANNED = {
    "picture": "image",
    "pictures": "images",
    "anew": "again",
    "beside": "next to",
    "besides": "in addition to",
    "becomes of": "",
    "is had from": "",
    "let go": "release",
    "lets go": "releases",
    "take note": "record",
    "is said": "record, log",
    "goes on from": "continues from",
    "go on from": "continue from",
    "at work": "",
}
WORDS = re.compile(r"\b(" + "|".join(map(re.escape, BANNED)) + r")\b", re.IGNORECASE)


ROOMS = ("scripts", "benchmarks", "blockwise", "dataset", "pipelines", "runtime", "training")


def written_words():
    """Yield the files whose words people read, and their text with line breaks as blanks."""
    code = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".sh")]
    for path in (*PAGES, *ROOT.glob("*.py"), *code):
        if path.name != "english.md":
            yield path.relative_to(ROOT), path.read_text()


@pytest.mark.parametrize("script", ["train_qwen_image.py", "train_wan_video.py"])
def test_no_such_word_in_the_help(script):
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert WORDS.findall(re.sub(r"\s+", " ", done.stdout)) == []


def test_no_word_that_the_glossary_replaces():
    found = []
    for name, text in written_words():
        found += [f"{name}: {match[0]}" for match in WORDS.finditer(re.sub(r"\s+(#\s+)?", " ", text))]
    # The caption of a tokenizer's training data is no prose of ours.
    assert [line for line in found if line != "scripts/make_tiny_model.py: beside"] == []
    glossary = (ROOT / "docs" / "english.md").read_text()
    assert [word for word in BANNED if word in ("picture", "anew", "beside", "let go") and word not in glossary] == []
