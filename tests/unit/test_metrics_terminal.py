"""What stands on the terminal, live and plain."""

from __future__ import annotations

import io
import re
import unicodedata

import pytest
from rich.console import Console
from rich.text import Text

from expert_iteration.metrics.sinks import Record
from expert_iteration.metrics.terminal import (
    LiveTerminal,
    PlainTerminal,
    Terminal,
    format_seconds,
    make_terminal,
    record_line,
)

COLLECTION = Record(
    "collection",
    {
        "progress/collection": 99,
        "progress/optimizer_step": 12,
        "reward/mean": 0.4375,
        "reward/accuracy": 0.25,
        "reward/pass_at_n": 0.625,
        "selection/accepted_samples": 1024,
        "selection/tied_groups": 12,
        "length/truncated_share": 0.034,
    },
)
STEP = Record(
    "step",
    {
        "progress/collection": 99,
        "progress/optimizer_step": 123456,
        "loss/total": 0.51234,
        "loss/kl_to_ref": 0.0312,
        "optim/grad_norm": 1.5,
        "optim/learning_rate": 3e-5,
    },
)
EVALUATION = Record(
    "eval",
    {
        "progress/collection": 3,
        "progress/optimizer_step": 48,
        "eval/accuracy": 0.5,
        "eval/low": 0.43123,
        "eval/high": 0.56877,
        "eval/num_problems": 1319,
        "eval/response_length_mean": 187.5,
        "eval/truncated_share": 0.025,
    },
)


class TtyOutput(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_on(terminal: Terminal) -> None:
    terminal.print("advice: raise env.repeats")
    terminal.start(100)
    terminal.show_stages(["generate"])
    terminal.advance(0.0)
    for record in (COLLECTION, STEP, EVALUATION):
        terminal.show(record)
    terminal.advance(0.005)
    terminal.show_stages([])
    terminal.close()
    terminal.close()


def test_plain_lines_are_readable_at_80_columns_without_control_characters() -> None:
    output = io.StringIO()
    run_on(make_terminal("plain", output))
    text = output.getvalue()
    lines = text.splitlines()
    assert lines == [
        "advice: raise env.repeats",
        "[100/100]  reward 0.438  acc 0.250  pass@N 0.625  kept 1024  tied 12  cut 3%",
        "  step 123456  loss 0.5123  KL 0.0312  grad 1.50  lr 3.0e-05  left --:--",
        "eval  accuracy 0.500 [0.431, 0.569]  problems 1319  length 187.5  truncated 2.5%",
    ]
    assert max(map(len, lines)) <= 80
    assert not [c for c in text if c != "\n" and unicodedata.category(c) == "Cc"]


def test_a_long_message_is_not_broken_in_plain_output() -> None:
    output = io.StringIO()
    make_terminal("plain", output).print("wandb failed: " + "x" * 200 + " [red] :smile:")
    assert output.getvalue() == "wandb failed: " + "x" * 200 + " [red] :smile:\n"


def test_what_a_record_does_not_hold_is_left_out() -> None:
    record = Record("collection", {"progress/collection": 0, "selection/accepted_samples": 0})
    assert record_line(record, None) == "[1]  kept 0"


def test_the_live_display_keeps_collections_and_shows_the_status_below() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80, height=24, force_terminal=True, color_system=None, highlight=False)
    terminal = LiveTerminal(console)
    terminal.start(100)
    terminal.show_stages(["generate"])
    terminal.advance(0.25)
    terminal.show(COLLECTION)
    terminal.show(STEP)
    page = Console(file=io.StringIO(), width=80, color_system=None)
    with page.capture() as capture:
        page.print(terminal)
    status = capture.get().splitlines()
    terminal.close()
    assert "[100/100]  reward 0.438" in output.getvalue()
    assert "lr 3.0e-05" not in output.getvalue()  # a step changes the status and adds no line
    assert re.fullmatch(r". generate \d+ s +\S+ +25%  left \d+:\d\d", status[0])
    assert "  step 123456  reward 0.438  accuracy 0.250  loss 0.5123  KL 0.0312" in status
    assert all(len(line) <= 80 for line in status)
    assert output.getvalue().rfind("\x1b[?25h") > output.getvalue().rfind("\x1b[?25l")  # the cursor is back


def test_auto_is_live_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = make_terminal("auto", TtyOutput())
    terminal.close()
    assert isinstance(terminal, LiveTerminal)
    assert isinstance(make_terminal("auto", io.StringIO()), PlainTerminal)
    assert isinstance(make_terminal("plain", TtyOutput()), PlainTerminal)
    with pytest.raises(ValueError, match="fancy"):
        make_terminal("fancy", io.StringIO())


def test_text_beyond_the_terminals_encoding_does_not_end_the_run() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    make_terminal("plain", file).print(Text("caf\u00e9 \U0001f600"))
    file.flush()
    assert raw.getvalue() == b"caf\\xe9 \\U0001f600\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "--:--"), (0.0, "0:00"), (59.6, "1:00"), (151.2, "2:31"), (3600.0, "1:00:00"), (36061.0, "10:01:01")],
)
def test_time_left_is_written_as_a_clock(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text
