"""Scoring in worker processes that hang, die and raise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from expert_iteration.errors import ComponentError
from expert_iteration.tasks import verifier_pool
from expert_iteration.tasks.verifier_pool import InProcessVerifier, VerifierPool
from expert_iteration.types import Prompt, Score
from tests.slow_verifiers import Unloadable, score_by_text, score_in_time

ROOT = Path(__file__).parents[2]
PROMPT = Prompt(0, ({"role": "user", "content": "?"},), "xx")
TIMED_OUT = Score(None, {"success": 0.0, "timed_out": 1.0})
CRASHED = Score(None, {"success": 0.0, "crashed": 1.0})


def items(*texts: str) -> list[tuple[Prompt, str]]:
    return [(PROMPT, text) for text in texts]


def rewards(scores: list[Score]) -> list[float | None]:
    return [score.reward for score in scores]


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(score_by_text, workers=2, time_limit_s=0.3) as pool:
        yield pool


def test_scores_come_in_the_order_of_the_items_and_equal_those_in_process(pool: VerifierPool) -> None:
    some = items(*("x" * (number % 7) for number in range(300)))
    assert pool.score_many(some) == InProcessVerifier(score_by_text).score_many(some)
    assert pool.score_many(some)[2] == Score(2.0, {"success": 1.0})
    assert pool.score_many([]) == []
    assert (pool.num_timed_out, pool.num_crashed) == (0, 0)


def test_workers_are_other_processes_and_score_in_their_main_thread(pool: VerifierPool) -> None:
    scores = pool.score_many(items(*["pid"] * 8))
    assert os.getpid() not in rewards(scores)
    assert {score.details["main_thread"] for score in scores} == {1.0}


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_EI_29_a_verifier_that_hangs_twenty_times_is_unscored_and_the_pool_answers_the_next(how: str) -> None:
    with VerifierPool(score_by_text, workers=1, time_limit_s=0.1) as pool:
        pool.score_many(items("warm"))
        start = time.monotonic()
        assert [pool.score_many(items(how)) for _ in range(20)] == [[TIMED_OUT]] * 20
        # Twenty limits, and as many new workers.
        assert time.monotonic() - start < 20 * (0.1 + 0.5)
        assert rewards(pool.score_many(items("xxx"))) == [3.0]
        assert pool.num_timed_out == 20


def test_EI_29_only_the_item_that_hangs_or_crashes_is_unscored(pool: VerifierPool) -> None:
    texts = ["x"] * 20
    texts[3], texts[4], texts[11], texts[19] = "sleep", "exit", "spin", "exit"
    scores = pool.score_many(items(*texts))
    assert [scores[i] for i in (3, 4, 11, 19)] == [TIMED_OUT, CRASHED, TIMED_OUT, CRASHED]
    assert rewards(scores).count(1.0) == 16
    assert (pool.num_timed_out, pool.num_crashed) == (2, 2)


def test_EI_29_threads_get_what_the_main_thread_gets(pool: VerifierPool) -> None:
    batches = [items(*("x" * (length + i) for i in range(30))) for length in range(8)]
    expected = [pool.score_many(batch) for batch in batches]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(pool.score_many, batches)) == expected
    hung: list[list[Score]] = []
    thread = threading.Thread(target=lambda: hung.append(pool.score_many(items("sleep", "x"))))
    thread.start()
    thread.join()
    assert rewards(hung[0]) == [None, 1.0]


def test_the_time_limit_is_per_item_and_not_for_the_call() -> None:
    with VerifierPool(score_in_time, workers=1, time_limit_s=0.5, concurrency=1) as slow:
        assert rewards(slow.score_many(items(*["x"] * 5))) == [1.0] * 5  # 1 s in all


def test_async_items_run_at_the_same_time_within_the_limit() -> None:
    with VerifierPool(score_in_time, workers=1, time_limit_s=5.0, concurrency=8) as pool:
        pool.score_many(items("warm"))
        start = time.monotonic()
        assert rewards(pool.score_many(items(*["xx"] * 16))) == [2.0] * 16
        assert 0.4 <= time.monotonic() - start < 1.6  # two rounds of 0.2 s, and not 16


def test_async_items_that_hang_or_block_are_unscored_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_pool, "GRACE_S", 0.2)
    with VerifierPool(score_in_time, workers=1, time_limit_s=0.5, concurrency=8) as pool:
        scores = pool.score_many(items("x", "hang", "xx", "block", "xxx"))
        assert rewards(scores) == [1.0, None, 2.0, None, 3.0]
        assert scores[1] == scores[3] == TIMED_OUT
        assert pool.num_timed_out == 2


def test_a_verifier_that_raises_stops_the_call_with_its_traceback_and_not_the_pool(pool: VerifierPool) -> None:
    with pytest.raises(ComponentError, match=r"row 0, response 'raise'(.|\n)*a bug in the verifier"):
        pool.score_many(items("x", "raise", "x"))
    assert rewards(pool.score_many(items("x", "xx"))) == [1.0, 2.0]


def test_a_verifier_that_cannot_be_loaded_is_an_error_and_no_endless_restart() -> None:
    pool = VerifierPool(Unloadable(), workers=1, time_limit_s=1.0)
    with pool, pytest.raises(ComponentError, match="no such verifier"):
        pool.score_many(items("x"))


def test_a_worker_killed_from_outside_is_replaced(pool: VerifierPool) -> None:
    (first,) = {int(reward or 0) for reward in rewards(pool.score_many(items("pid")))}
    os.kill(first, signal.SIGKILL)
    psutil.Process(first).wait(5) if psutil.pid_exists(first) else None
    scores = pool.score_many(items("x", "xx", "xxx"))
    assert [s.reward for s in scores if s != CRASHED] == [float(i + 1) for i, s in enumerate(scores) if s != CRASHED]
    assert rewards(pool.score_many(items("x", "xx"))) == [1.0, 2.0]


def test_what_a_verifier_leaks_goes_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_pool, "MAX_ITEMS_PER_WORKER", 50)
    with VerifierPool(score_by_text, workers=1, time_limit_s=5.0) as pool:
        leaked = [reward or 0 for _ in range(10) for reward in rewards(pool.score_many(items(*["leak"] * 20)))]
    assert len(leaked) == 200 and max(leaked) <= 60


def test_memory_of_the_caller_does_not_grow_with_the_items(pool: VerifierPool) -> None:
    some = items(*["x" * 200] * 1000)
    pool.score_many(some)
    before = psutil.Process().memory_info().rss
    for _ in range(10):
        pool.score_many(some)
    assert psutil.Process().memory_info().rss - before < 8 * 2**20


def test_a_closed_pool_has_no_workers_left_even_when_they_hung() -> None:
    pool = VerifierPool(score_by_text, workers=2, time_limit_s=60.0)
    pids = {int(reward or 0) for reward in rewards(pool.score_many(items(*["pid"] * 8)))}
    pool.close()
    pool.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    with pytest.raises(ValueError, match="closed"):
        pool.score_many(items("x"))


def test_programs_that_a_verifier_has_started_end_with_its_worker(pool: VerifierPool) -> None:
    (program,) = {int(reward or 0) for reward in rewards(pool.score_many(items("program")))}
    assert is_running(program)
    with VerifierPool(score_by_text, workers=1, time_limit_s=0.3) as other:
        other.score_many(items("spin"))
    assert is_running(program)
    pool.score_many(items("spin"))
    assert wait_until_gone(program, 5)


def test_a_worker_that_no_longer_reads_is_replaced() -> None:
    with VerifierPool(score_by_text, workers=1, time_limit_s=0.5) as pool:
        assert rewards(pool.score_many(items("deaf"))) == [4.0]
        time.sleep(0.5)
        assert pool.score_many(items("x" * 5_000_000, "xx")) == [TIMED_OUT, Score(2.0, {"success": 1.0})]


def test_what_the_main_module_imports_is_imported_once_for_all_workers(tmp_path: Path) -> None:
    (tmp_path / "imported_by_main.py").write_text('print("imported", flush=True)\n')
    script = """
        import imported_by_main
        from expert_iteration.tasks.verifier_pool import VerifierPool
        from expert_iteration.types import Prompt
        from tests.slow_verifiers import score_by_text

        if __name__ == "__main__":
            with VerifierPool(score_by_text, workers=1, time_limit_s=5.0) as pool:
                pool.score_many([(Prompt(0, (), ""), "exit")] * 3)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, str(tmp_path / "script.py")]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    assert output.split().count("imported") == 2  # by the script and by the server that forks the workers


SCRIPT = """
    import os, signal, sys, threading, time
    from expert_iteration.tasks.verifier_pool import VerifierPool
    from expert_iteration.types import Prompt
    from tests.slow_verifiers import score_by_text

    if __name__ == "__main__":
        pool = VerifierPool(score_by_text, workers={workers}, time_limit_s={limit})
        prompt = Prompt(0, (), "")
        print(int(pool.score_many([(prompt, "pid")])[0].reward), flush=True)
        if {interrupt}:
            # To the main thread, as a terminal's: one that another thread takes would not end the wait.
            threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        try:
            pool.score_many([(prompt, text) for text in {hung}])
        except KeyboardInterrupt:
            print(pool.score_many([(prompt, "xxx")])[0].reward, flush=True)
            pool.close()
"""


def start(tmp_path: Path, **values: object) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(**values))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)


def wait_for_workers(pid: int, count: int) -> list[psutil.Process]:
    """The worker processes of a program, each with its chunk: they are the children of its server process."""
    deadline = time.monotonic() + 60
    workers: list[psutil.Process] = []
    while len(workers) < count and time.monotonic() < deadline:
        time.sleep(0.1)
        workers = [grandchild for child in psutil.Process(pid).children() for grandchild in child.children()]
    time.sleep(0.5)
    return workers


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_ctrl_c_in_the_middle_leaves_a_pool_that_answers_and_closes(tmp_path: Path) -> None:
    with start(tmp_path, limit=60.0, interrupt=True, workers=1, hung=("spin",)) as process:
        output, _ = process.communicate(timeout=60)
    pid, reward = output.split()
    assert (reward, process.returncode) == ("3.0", 0)
    assert wait_until_gone(int(pid), 5)


def test_workers_that_hang_end_when_their_program_was_killed(tmp_path: Path) -> None:
    with start(tmp_path, limit=600.0, interrupt=False, workers=3, hung=("sleep", "spin", "alarm")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        processes = wait_for_workers(process.pid, 3)
        process.kill()
    assert all(wait_until_gone(worker.pid, 10) for worker in processes)


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"time_limit_s": 0.0}, {"concurrency": 0}])
def test_arguments_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        VerifierPool(score_by_text, **{"workers": 1, "time_limit_s": 1.0, **wrong})  # type: ignore[arg-type]
