"""The generated tasks: right answers, fair choices, and files that the commands can read."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from noloco_p2p.cli.main import app
from noloco_p2p.io.data.tokenizers import BYTES
from noloco_p2p.lab.made_tasks import CHOICES, MAX_BYTES, PAIRS, TASKS, TRAIN, TaskItem, items, write_tasks
from noloco_p2p.launch.examples import read_examples


def solved(task: str, given: str) -> str:
    """The answer, computed independently."""
    if task == "addition":
        left, right = given.split("+")
        return str(int(left) + int(right))
    if task == "sorting":
        return "".join(letter * given.count(letter) for letter in map(chr, range(97, 123)))
    if task == "recall":
        *stored, asked = given.split(" ")
        return dict(one.split("=") for one in stored)[asked]
    if task == "copying":
        return given
    answer = ""
    while given:
        while any(pair in given for pair in map("".join, PAIRS.items())):
            for opened, closed in PAIRS.items():
                given = given.replace(opened + closed, "")
        if given:
            answer, given = answer + PAIRS[given[-1]], given[:-1]
    return answer


@pytest.mark.parametrize("task", TASKS)
def test_items_are_correct_distinct_and_short(task: str) -> None:
    found = items(task, 3, 1000)
    for item in found:
        name, given = item.prompt.removesuffix("=").split(" ", 1)
        assert (name, item.completion) == (task, solved(task, given))
        assert item.choices[item.answer] == item.completion
        assert len(set(item.choices)) == CHOICES
        assert {len(choice) for choice in item.choices} == {len(item.completion)}
        assert len((item.prompt + item.completion).encode()) < MAX_BYTES
    assert len({item.prompt for item in found}) == 1000
    # No position is favoured: for four seeds of five each position has 224 to 276 of 1,000 answers; 190 is 4σ below.
    assert all(sum(item.answer == place for item in found) > 190 for place in range(CHOICES))
    assert items(task, 3, 10) == found[:10] != items(task, 4, 10)


def test_asking_for_more_items_than_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="addition has only about"):
        items("addition", 0, 10_001)


def test_the_files_can_be_read_by_the_commands(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tasks", str(tmp_path), "--seed", "1", "--train", "30", "--test", "20"])
    assert done.exit_code == 0, done.output
    tested = write_tasks(tmp_path / "again", 1, 30, 20)
    for file in sorted((tmp_path / "again").iterdir()):
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()
    trained = [json.loads(line) for line in (tmp_path / TRAIN).read_text().splitlines()]
    assert len(read_examples([str(tmp_path / TRAIN)], BYTES)) == len(trained) == 30 * len(TASKS)
    assert [one["prompt"].split()[0] for one in trained[: len(TASKS)]] == list(TASKS)
    prompts = {one["prompt"] for one in trained}
    for task, found in tested.items():
        lines = [json.loads(line) for line in (tmp_path / f"{task}.jsonl").read_text().splitlines()]
        assert [TaskItem(**line)._replace(choices=tuple(line["choices"])) for line in lines] == found
        assert not prompts & {one.prompt for one in found}
        for name in (task, f"{task}_choice"):
            assert yaml.safe_load((tmp_path / f"{name}.yaml").read_text())["task"] == name
