"""The command line: one report of all problems with status 2, every ending with its own status."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from expert_iteration.checkpoint_files import sha256
from expert_iteration.config.derived import experiment_name
from expert_iteration.config.loader import Main, load, run
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import ComponentError, Problem, UserError

CONFIG_DIR = Path(__file__).parents[2] / "config"
Runs = list[tuple[RunConfig, Path]]
Runner = Callable[..., int]


@pytest.fixture
def runs() -> Runs:
    """What `main` was called with."""
    return []


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Hydra's log handlers write to the streams of the test that it ran in."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def run_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs) -> Runner:
    """Runs a command line of the demo in an empty folder; `main` records its calls, then does `act`."""
    monkeypatch.chdir(tmp_path)

    def run_demo(*arguments: str, act: Callable[[RunConfig], int] = lambda config: 0) -> int:
        def main(config: RunConfig, run_dir: Path) -> int:
            runs.append((config, run_dir))
            return act(config)

        return run(main, mode="sync", config_dir=CONFIG_DIR, default_config="ei_demo", argv=arguments)

    return run_demo


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return [line.strip() for line in error.splitlines()]


def test_a_run_gets_its_config_and_a_folder(run_demo: Runner, runs: Runs, tmp_path: Path) -> None:
    assert run_demo("mode=sync", "train.topk_size=2", "--config-name", "ei_demo", "plan=true") == 0
    ((config, run_dir),) = runs
    assert (config.train.topk_size, config.plan, config.env.dataset) == (2, True, "reasoning_gym")
    assert run_dir.parent.parent == tmp_path / "outputs"
    assert "topk_size: 2" in (run_dir / ".hydra" / "config.yaml").read_text()
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(
    ("override", "report"),
    [
        ("+train.lrr=1", "train.lrr=1: no such key; perhaps optimizer.lr is meant."),
        ("++train.lr=1", "train.lr=1: no such key; perhaps optimizer.lr is meant."),
        ("seed=None", "seed=None: has to be an integer; this is the word 'None', not a blank; give an integer."),
        ("seed=", "seed='': has to be an integer; give an integer."),
        ("optimizer.lr='1e-5'", "optimizer.lr='1e-5': has to be a number; give a number."),
        ("train.epochs=true", "train.epochs=true: has to be an integer; give an integer."),
        ("train.kl_to_ref_coeff=nan", "train.kl_to_ref_coeff=nan: has to be a finite number; give a number."),
        ("logging.experiment_name=", "logging.experiment_name='': may not be an empty text; "),
        ("train.epochs=${no.such}", "train.epochs=${no.such}: "),
        ("train.epochs=???", "train.epochs=???: every key needs a value; "),
        ("train=5", "train=5: a group of keys; "),
        ("train.epochs.x=1", "train.epochs={'x': 1}: has to be an integer; "),
        ("~train.epochs", "~train.epochs=: a key cannot be removed; "),
        ("train.epochs=[1", "train.epochs=[1: cannot be read ("),
        ("train.epochs", "train.epochs=: cannot be read ("),
        ("train.epochs=1,2", "train.epochs=1,2: has several values; add --multirun"),
        ("mode=async", "mode=async: this script runs mode=sync only; write mode=sync, or leave it out."),
        ("+mode=async", "mode=async: this script runs mode=sync only; "),
        ("hydra.nonsense=1", "hydra.nonsense=1: Could not override 'hydra.nonsense'; "),
        ("hydra/launcher=nonsense", "hydra/launcher=nonsense: In 'hydra/config': Could not find"),
        ("env.data_path=absent.jsonl", "env.data_path="),
        ("model.name=./absent", "model.name="),
        ("reward_model=./absent", "reward_model.name="),
        ("reward_model=", "reward_model.name='': may not be an empty text; "),
        ("reward_model=[a]", "reward_model.name=['a']: has to be text; "),
        ("model.chat_template=absent.jinja", "model.chat_template="),
        ("model.chat_template=chatml", "model.chat_template='chatml': is no file, no Jinja template"),
        ("env.options=7", "env.options=7: has to be a mapping; "),
        ("env.options={generator: gcd, x: nan}", "env.options.x=nan or inf: has to be a finite number; "),
    ],
)
def test_EI_43_refused_by_name_before_anything_runs(
    run_demo: Runner, runs: Runs, capsys: pytest.CaptureFixture[str], override: str, report: str
) -> None:
    assert run_demo(override) == 2
    assert any(line.startswith(report) for line in lines(capsys)[1:])
    assert runs == []
    assert list(Path.cwd().iterdir()) == []


def test_EI_43_one_report_lists_all_problems(run_demo: Runner, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["train.epochs=[1", "mode=async", "+train.lrr=1", "seed=x", "train.topk_size=17", "optimizer.lr=inf"]
    assert run_demo(*overrides, "hydra.x=1") == 2
    heading, *problems = lines(capsys)
    assert heading == "7 problems in the configuration:"
    assert [problem.partition("=")[0] for problem in problems] == [
        "train.epochs",
        "mode",
        "hydra.x",
        "seed",
        "train.lrr",
        "optimizer.lr",
        "train.topk_size",
    ]
    assert runs == []


def test_EI_43_1e3_is_1000(run_demo: Runner, runs: Runs) -> None:
    assert run_demo("train.epochs=1e3", "env.num_envs=null") == 0
    assert runs[0][0].train.epochs == 1000
    assert runs[0][0].env.num_envs is None


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        (
            ["--config-name", "ei_dmo"],
            "--config-name=ei_dmo: no such config; take one of ei_demo, ei_gsm8k, ei_ifeval.",
        ),
        (["--config-dir", "absent"], "--config-dir="),
        (["--multirun", "--cfg", "job"], "flags=--multirun --cfg: exclude one another; give one of them."),
        (["--resolve"], "flags=--resolve: belongs to --cfg; "),
        (["--multirun", "optimizer.lr=interval(0,1)"], "optimizer.lr=interval(0,1): no sweep over an interval; "),
    ],
)
def test_bad_flags(
    run_demo: Runner, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], report: str
) -> None:
    assert run_demo(*arguments) == 2
    assert lines(capsys)[1].startswith(report)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a: [1", "defaults: [absent]", "- 1", "defaults: [ei_gsm8k, _self_]\ntrain: 5"])
def test_a_broken_file_is_a_problem_of_the_input(
    run_demo: Runner, runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert run_demo("--config-dir", ".", "--config-name", "own") == 2
    assert len(lines(capsys)) >= 2
    assert runs == []


def test_a_file_of_ones_own(run_demo: Runner, runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [ei_demo, _self_]\ntrain: {topk_size: 3}\n")
    assert run_demo("--config-dir", ".", "--config-name", "own", "train.epochs=5") == 0
    assert (runs[0][0].train.topk_size, runs[0][0].train.epochs) == (3, 5)


def test_free_form_options_need_no_plus() -> None:
    config = load(["env.options.extra=2", "~env.options.min_terms"], config_dir=CONFIG_DIR, config_name="ei_demo")
    assert config.env.options == {
        "generator": "chain_sum",
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "extra": 2,
    }


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward_model=org/rm", "reward_model.weight=0.5"],
        ["reward_model.weight=0.5", "++reward_model=org/rm"],
        ["reward_model={name: org/rm, weight: 0.5}"],
    ],
)
def test_a_text_for_the_reward_model_is_its_name(overrides: list[str]) -> None:
    reward_model = load(overrides, config_dir=CONFIG_DIR, config_name="ei_gsm8k").reward_model
    assert (reward_model.name, reward_model.weight, reward_model.batch_size) == ("org/rm", 0.5, 16)


def test_a_sweep_over_reward_models(run_demo: Runner, runs: Runs) -> None:
    assert run_demo("--multirun", "reward_model=org/one,org/two") == 0
    assert [config.reward_model.name for config, _ in runs] == ["org/one", "org/two"]


def test_a_whole_mapping_replaces_the_options_of_the_file() -> None:
    config = load(["env.options={generator: gcd}"], config_dir=CONFIG_DIR, config_name="ei_demo")
    assert config.env.options == {"generator": "gcd"}


def test_EI_43_relative_paths_start_at_the_launch_directory(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    overrides = [
        "env.data_path=rows.jsonl",
        "env.expert_data=rows.jsonl",
        "model.name=org/model",
        "reward_model=org/model",
        "model.chat_template=chat.jinja",
        "logging.checkpoint_dir=./saved",
    ]
    config = load(overrides, config_dir=CONFIG_DIR, config_name="ei_gsm8k", launch_dir=tmp_path)
    assert config.env.data_path == config.env.expert_data == str(tmp_path / "rows.jsonl")
    assert config.model.name == config.reward_model.name == str(tmp_path / "org" / "model")
    assert config.model.chat_template == str(tmp_path / "chat.jinja")
    assert config.logging.checkpoint_dir == str(tmp_path / "saved")


def test_names_that_are_no_paths_stay_as_they_are(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" * 20
    overrides = ["model.name=meta-llama/Llama-2-7b-hf", f"model.chat_template='{template}'"]
    config = load(overrides, config_dir=CONFIG_DIR, config_name="ei_gsm8k", launch_dir=tmp_path)
    assert config.model.name == "meta-llama/Llama-2-7b-hf"
    assert config.model.chat_template == template


def test_load_raises_all_problems() -> None:
    with pytest.raises(UserError) as caught:
        load(["train.topk_size=99", "a=1"], config_dir=CONFIG_DIR, config_name="ei_demo")
    assert [problem.key for problem in caught.value.problems] == ["a", "train.topk_size"]


def test_EI_43_jobs_of_a_sweep_share_no_folder(run_demo: Runner, runs: Runs, tmp_path: Path) -> None:
    arguments = ["train.topk_size=2,4", "logging.checkpoint_dir=./ckpt", "hydra.job.chdir=true"]
    assert run_demo("--multirun", *arguments) == 0
    assert [config.train.topk_size for config, _ in runs] == [2, 4]
    assert [config.logging.checkpoint_dir for config, _ in runs] == [str(tmp_path / "ckpt" / n) for n in "01"]
    assert [run_dir.name for _, run_dir in runs] == ["0", "1"]
    assert runs[0][1].parent == runs[1][1].parent
    assert tmp_path / "multirun" in runs[0][1].parents


def test_two_jobs_are_not_let_into_one_folder(run_demo: Runner, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--multirun", "train.topk_size=2,4", "hydra.sweep.subdir=same") == 2
    assert len(runs) == 1
    assert "two jobs would write to one folder" in capsys.readouterr().err


def test_a_sweep_goes_on_after_a_failed_job_and_ends_with_the_largest_status(
    run_demo: Runner, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(config: RunConfig) -> int:
        if config.train.topk_size == 3:
            raise ComponentError("the engine broke")
        return 0

    assert run_demo("--multirun", "train.topk_size=2,99,3,4", act=act) == 3
    assert [config.train.topk_size for config, _ in runs] == [2, 3, 4]
    error = capsys.readouterr().err
    assert "train.topk_size=99: top-k chooses" in error
    assert "ComponentError: the engine broke" in error


def test_what_every_job_of_a_sweep_has_wrong_is_refused_before_the_first(
    run_demo: Runner, runs: Runs, tmp_path: Path
) -> None:
    assert run_demo("--multirun", "train.topk_size=2,4", "optimizer.lrr=1") == 2
    assert run_demo("--multirun", "train.topk_size=2,4", "env.repeats=1") == 2
    assert runs == []
    assert list(tmp_path.iterdir()) == []


def test_user_error_of_a_run_is_status_2(run_demo: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    def act(config: RunConfig) -> int:
        raise UserError(Problem("env.data_path", "x", "row 3 has no answer", "give it one"))

    assert run_demo(act=act) == 2
    assert lines(capsys)[-1] == "env.data_path=x: row 3 has no answer; give it one."


@pytest.mark.parametrize("error", [ComponentError("broken part"), RuntimeError("unforeseen"), KeyError("x")])
def test_any_other_error_is_status_3_with_its_own_traceback(
    run_demo: Runner, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def act(config: RunConfig) -> int:
        raise error

    assert run_demo(act=act) == 3
    text = capsys.readouterr().err
    assert "in act" in text
    assert str(error) in text


def test_ctrl_c_ends_a_whole_sweep_with_130(run_demo: Runner, runs: Runs) -> None:
    def act(config: RunConfig) -> int:
        raise KeyboardInterrupt

    assert run_demo("--multirun", "train.topk_size=2,4", act=act) == 130
    assert len(runs) == 1


def test_sigterm_unwinds_the_run_and_ends_with_143(run_demo: Runner, runs: Runs) -> None:
    unwound = []

    def act(config: RunConfig) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            unwound.append(True)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    assert run_demo("--multirun", "train.topk_size=2,4", act=act) == 143
    assert (len(runs), unwound) == (1, [True])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "topk_size: 3"),
        (["--hydra-help"], "--config-name"),
        (["--cfg", "job", "train.topk_size=3"], "topk_size: 3"),
        (["--info", "defaults"], "mode/sync"),
    ],
)
def test_hydras_flags_work(
    run_demo: Runner, runs: Runs, capsys: pytest.CaptureFixture[str], arguments: list[str], shown: str
) -> None:
    assert run_demo(*arguments) == 0
    assert shown in capsys.readouterr().out
    assert runs == []


def test_a_wrong_command_line_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from expert_iteration.config.loader import run\n"
        f"status = run(lambda config, run_dir: 0, mode='sync', config_dir=Path({str(CONFIG_DIR)!r}),\n"
        "             default_config='ei_demo', argv=['train.lrr=1'])\n"
        "print(status, [name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == "2 []\n"


def test_main_is_called_with_a_config_and_a_path() -> None:
    assert Main.__args__ == (RunConfig, Path, int)  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", [(), ("hydra.run.dir=my/${seed}/run",)])
def test_resume_auto_goes_on_in_the_folder_of_the_run_that_was_cut_short(
    run_demo: Runner, runs: Runs, capsys: pytest.CaptureFixture[str], where: tuple[str, ...]
) -> None:
    def save_and_fail(config: RunConfig) -> int:
        folder = runs[-1][1] / "checkpoints" / "checkpoint_0003"
        folder.mkdir(parents=True)
        (runs[-1][1] / "metrics.jsonl").touch()
        metadata = {"experiment_name": experiment_name(config), "config": asdict(config)}
        (folder / "metadata.json").write_text(json.dumps(metadata))
        (folder / "COMPLETE").write_text(f"{sha256(folder / 'metadata.json')}  metadata.json\n")
        return 3

    assert run_demo("resume=auto", *where, act=save_and_fail) == 3
    run_dir = runs[0][1]
    assert run_demo("resume=auto", *where) == 0
    assert runs[1][1] == run_dir
    assert runs[1][0].resume == str(run_dir / "checkpoints" / "checkpoint_0003")
    assert f"Goes on from {run_dir / 'checkpoints' / 'checkpoint_0003'}" in capsys.readouterr().out
    assert run_demo(f"resume={run_dir}", "hydra.run.dir=elsewhere", "logging.progress=plain") == 0
    assert runs[2][1] == run_dir

    assert run_demo("resume=auto", *where, "train.topk_size=2", "env.repeats=32") == 2
    assert lines(capsys)[1:] == [
        "env.repeats=32: the run that is resumed has 16, and prompts and rewards so far belong to it; write that "
        "again, or start a new run by resume=never.",
        "train.topk_size=2: the run that is resumed has 3, and it decides what the steps so far have done; write that "
        "again, or start a new run by resume=never.",
    ]
    assert run_demo("resume=auto", *where, "logging.experiment_name=another") == 0
    assert runs[3][0].resume == "auto"  # nothing to go on with
    (run_dir / "FINISHED").touch()
    assert run_demo("resume=auto", *where) == 0
    assert runs[4][0].resume == "auto"
    assert len(runs) == 5


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        (
            ("resume=auto", "--multirun", "seed=1,2"),
            "resume=auto: a sweep cannot be resumed; resume its jobs one by one",
        ),
        (("resume=./nowhere",), "nowhere: holds no complete checkpoint; give a folder checkpoint_NNNN"),
    ],
)
def test_what_cannot_be_resumed_is_told(
    run_demo: Runner, runs: Runs, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], report: str
) -> None:
    assert run_demo(*arguments) == 2
    assert report in lines(capsys)[1]
    assert runs == []
