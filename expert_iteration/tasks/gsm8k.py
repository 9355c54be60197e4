"""GSM8K: grade-school word problems whose answer is a number (https://arxiv.org/abs/2110.14168).

The same reward serves every file of rows {"question": "...", "answer": "... #### 72"}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.answers import (
    answers_match,
    closeness,
    extract_answer,
    find_numbers,
    parse_number,
    strip_reasoning,
)
from expert_iteration.tasks.base import (
    SPLITS,
    check_gold_answers,
    check_prompt_template,
    check_sizes,
    is_held_out,
    question_key,
    render_prompt,
)
from expert_iteration.tasks.qa_files import QARow, parse_records, read_rows, split_files
from expert_iteration.types import Prompt, Score, Split

__all__ = ["GSM8K", "answers_match", "extract_answer", "gold_number"]

HUB_NAME = "openai/gsm8k"
HUB_CONFIG = "main"
PROMPT_TEMPLATE = (
    "{question}\n\n"
    'Think step by step. Then write the answer on a last line of its own, as "#### <number>", with nothing after it.'
)
# In tenths, because 0.8 + 0.1 + 0.1 is not 1 in floating point.
CORRECT_TENTHS = 8
FORMAT_TENTHS = 1
CLOSENESS_TENTHS = 1

_ANSWER_LINE = re.compile(r"####(?!#)\s*(\S.*)")


class GSM8K:
    """The data set with its reward; docs/rewards.md states both.

    `num_duplicates` counts rows dropped because the same question with the same answer stood in their split before;
    `num_held_out` counts training rows dropped because their question stands in the held-out split.
    """

    name = "gsm8k"

    def __init__(
        self,
        *,
        data_path: str | None = None,
        prompt_template: str | None = None,
        reward: str = "exact",
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        """Reads and checks all rows. Raises UserError for unusable files, rows, sizes or a bad prompt template."""
        self._template = prompt_template or PROMPT_TEMPLATE
        check_prompt_template(self._template)
        self._graded = reward == "graded"
        self._sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
        rows = _load_from_hub() if data_path is None else _load_from_path(Path(data_path))
        test, test_duplicates = _without_duplicates(rows["test"])
        train, train_duplicates = _without_duplicates(rows["train"])
        held_out = {question_key(row.question) for row in test}
        self._rows = {"train": [row for row in train if question_key(row.question) not in held_out], "test": test}
        self.num_duplicates = test_duplicates + train_duplicates
        self.num_held_out = len(train) - len(self._rows["train"])
        check_sizes(self._sizes, {split: len(self._rows[split]) for split in SPLITS})

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Rows of a split, in the order of the data. No question stands in both splits."""
        return self._prompts[split]

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward in [0, 1]: 1 or 0 (exact), or the weighted sum of correct, format and closeness (graded)."""
        answer = extract_answer(response_text)
        success = float(answer is not None and answers_match(answer, prompt.gold))
        in_format = float(ends_with_answer_line(response_text))
        near = closeness(answer, prompt.gold)
        graded = (CORRECT_TENTHS * success + FORMAT_TENTHS * in_format + CLOSENESS_TENTHS * near) / 10
        reward = graded if self._graded else success
        return Score(reward, {"success": success, "format": in_format, "closeness": near})

    def self_check(self) -> None:
        """Raises UserError, naming rows, unless every gold answer scores 1 and no empty response does."""
        for split in SPLITS:
            check_gold_answers(self.prompts(split), self.score, lambda prompt: f"#### {prompt.gold}")

    @cached_property
    def _prompts(self) -> dict[Split, list[Prompt]]:
        return {
            split: [
                Prompt(row.index, render_prompt(self._template, row.question), row.gold)
                for row in self._rows[split][: self._sizes[split]]
            ]
            for split in SPLITS
        }


def gold_number(solution: str) -> str | None:
    """The one number after the last `####` of a solution; None without."""
    _, hashes, answer = solution.rpartition("####")
    return find_numbers(answer)[0] if hashes and parse_number(answer) is not None else None


def ends_with_answer_line(response: str) -> bool:
    """Whether the last line that is not blank is `#### ` with one number."""
    last_line = strip_reasoning(response).rstrip().rpartition("\n")[2].strip()
    match = _ANSWER_LINE.fullmatch(last_line)
    return match is not None and len(find_numbers(match.group(1))) == 1


def _without_duplicates(rows: Sequence[QARow]) -> tuple[list[QARow], int]:
    """The rows less repetitions of a question with an equal answer, and how many these were.

    The same question with another answer stays, as a row of its own.
    """
    seen = set()
    distinct = []
    for row in rows:
        key = (question_key(row.question), parse_number(row.gold))
        if key not in seen:
            seen.add(key)
            distinct.append(row)
    return distinct, len(rows) - len(distinct)


def _load_from_path(path: Path) -> dict[Split, list[QARow]]:
    """Rows of a folder with a file or files for each split, or of one file, a fifth of whose questions are held out."""
    if path.is_dir():
        files = {split: split_files(path, split) for split in SPLITS}
        missing = [split for split in SPLITS if not files[split]]
        if missing:
            raise UserError(*(_no_file(path, f"has no file for the {split} split") for split in missing))
        return _numbered(*(read_rows(files[split], gold_number) for split in SPLITS))
    if not path.is_file():
        raise UserError(_no_file(path, "does not exist"))
    rows = read_rows([path], gold_number)
    held_out = [is_held_out(row.question, 0) for row in rows]
    return {
        "train": [row for row, out in zip(rows, held_out, strict=True) if not out],
        "test": [row for row, out in zip(rows, held_out, strict=True) if out],
    }


def _load_from_hub() -> dict[Split, list[QARow]]:
    import datasets

    try:
        data = datasets.load_dataset(HUB_NAME, HUB_CONFIG)
    except Exception as error:  # a lack of network shows itself in many types
        raise UserError(
            Problem(
                "env.data_path",
                "(blank)",
                f"{HUB_NAME} cannot be loaded from the hub ({type(error).__name__}: {str(error)[:200]})",
                "connect to the network, or set env.data_path to a folder with train.jsonl and test.jsonl",
            )
        ) from error
    parsed = [parse_records(data[split].to_list(), f"{HUB_NAME} {split}", gold_number) for split in SPLITS]
    problems = [problem for _, bad in parsed for problem in bad]
    if problems:
        raise UserError(*problems)
    return _numbered(*(rows for rows, _ in parsed))


def _numbered(train: list[QARow], test: list[QARow]) -> dict[Split, list[QARow]]:
    """Both splits with indices that go on from the last training row, dropped rows counted, so that they are unique."""
    return {"train": train, "test": [QARow(len(train) + row.index, row.question, row.gold) for row in test]}


def _no_file(path: Path, what: str) -> Problem:
    return Problem(
        "env.data_path",
        path,
        f"{what}: a folder with train.jsonl and test.jsonl (or .parquet), or one such file, is needed",
        "correct the path, or leave it blank to load the data set from the hub",
    )
