"""Every metric that a run logs: its name, its unit and what it means. The single source of docs/metrics.md.

`python -m expert_iteration.metrics.glossary` prints the tables of that page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Metric(NamedTuple):
    """One row of the glossary."""

    unit: str
    meaning: str
    """One sentence."""


GROUPS: dict[str, str] = {
    "progress": "Where the run stands. The first two are on every line.",
    "reward": "Rewards of what the policy has sampled; completions that could not be scored are left out.",
    "parts": "What rewards are made of: one metric for each component, reward function and reward model.",
    "unscored": "Why completions have no reward. One metric for each reason.",
    "selection": "What the selection kept, and why it dropped groups: a dropped group counts under one reason.",
    "length": "Lengths of what the policy has sampled.",
    "expert": "Responses of env.expert_data; the first five only where there are any in the collection.",
    "prompts": "Prompts that could not be used.",
    "buffer": "What the replay buffer holds for training, apart from what was just collected.",
    "collector": "What each call of the collector gave, on lines of kind `collector`, before selection; "
    "RemoteDataLogger.log_data makes them and the place to add some.",
    "async": "How the trainer and the collections in the background keep step, with mode=async.",
    "loss": "Terms of the loss, normalised over the whole optimizer batch.",
    "optim": "The optimizer step.",
    "policy": "Which weights sampled, and how far trainer and engine agree.",
    "train": "Whether training moves the weights.",
    "eval": "Greedy evaluation on held-out problems.",
    "time": "Wall time; a stage's seconds are those since the line that last reported it.",
    "perf": "Throughput.",
    "memory": "Memory.",
}
"""Title sentence of each name prefix, in the order of the page."""

GLOSSARY: dict[str, Metric] = {
    "progress/optimizer_step": Metric("steps", "Optimizer steps taken so far."),
    "progress/collection": Metric(
        "collections",
        "Index of the collection, from 0; on eval lines the number of collections that have been trained on.",
    ),
    "progress/run": Metric(
        "share",
        "Share of the run that lies behind: each collection owns the share of the steps planned for it.",
    ),
    "progress/dialog_turns": Metric("completions", "Completions collected so far."),
    "reward/mean": Metric("reward", "Mean reward of the collection's scored completions."),
    "reward/std": Metric("reward", "Population standard deviation of the rewards."),
    "reward/min": Metric("reward", "Lowest reward."),
    "reward/max": Metric("reward", "Highest reward."),
    "reward/accuracy": Metric("share", "Share of the scored completions that succeed by the task's exact metric."),
    "reward/pass_at_n": Metric("share", "Share of the groups with at least one success among their N completions."),
    "parts/*": Metric("part", "Mean of this part over the scored completions that have it."),
    "unscored/*": Metric("completions", "Completions and expert responses without a reward for this reason."),
    "selection/groups": Metric("groups", "Groups collected: one per visit to a prompt."),
    "selection/accepted_groups": Metric("groups", "Groups of which at least one completion was kept."),
    "selection/tied_groups": Metric("groups", "Groups dropped because all their scored rewards are equal."),
    "selection/unscored_groups": Metric("groups", "Groups dropped because none of their completions could be scored."),
    "selection/below_min_reward_groups": Metric(
        "groups", "Groups dropped because no completion reached selection.min_reward."
    ),
    "selection/truncated_groups": Metric(
        "groups", "Groups dropped because every completion that qualified was cut by the length limit."
    ),
    "selection/not_above_groups": Metric(
        "groups", "Groups dropped because no reward is above the statistic though they differ (median only)."
    ),
    "selection/accepted_samples": Metric("completions", "Completions kept for training."),
    "selection/accepted_reward_mean": Metric("reward", "Mean reward of the completions kept for training."),
    "selection/unscored_samples": Metric("completions", "Completions and expert responses that could not be scored."),
    "selection/truncated_samples": Metric("completions", "Completions cut by the length limit."),
    "selection/empty_collections": Metric("collections", "Collections in a row, up to now, that selected nothing."),
    "expert/rollouts": Metric("responses", "Expert responses that entered the groups."),
    "expert/unscored_rollouts": Metric("responses", "Of these, those that could not be scored."),
    "expert/reward_mean": Metric("reward", "Mean reward of the scored ones."),
    "expert/selected": Metric("responses", "Expert responses kept for training."),
    "expert/selected_share": Metric("share", "Share of what was kept for training that experts wrote."),
    "expert/dropped_held_out": Metric("rows", "Rows of the file left out because their prompt is held out."),
    "expert/dropped_unmatched": Metric("rows", "Rows left out because they name no prompt of the training split."),
    "expert/dropped_too_long": Metric("rows", "Rows left out as longer than inference_model.max_tokens."),
    "length/response_mean": Metric("tokens", "Mean length of the responses, the end token included."),
    "length/response_std": Metric("tokens", "Population standard deviation of the response lengths."),
    "length/response_min": Metric("tokens", "Shortest response."),
    "length/response_max": Metric("tokens", "Longest response."),
    "length/prompt_mean": Metric("tokens", "Mean length of the encoded prompts."),
    "length/truncated_share": Metric("share", "Share of the completions that the length limit cut."),
    "prompts/dropped_too_long": Metric(
        "prompts", "Prompts dropped so far because prompt and response would not fit the model's context."
    ),
    "buffer/size": Metric("samples", "Samples in the buffer."),
    "buffer/writes": Metric("samples", "Samples written so far."),
    "buffer/evicted_samples": Metric("samples", "Samples dropped so far because they exceeded train.max_policy_age."),
    "buffer/gradient_steps_per_write": Metric("steps/sample", "Optimizer steps so far per sample written so far."),
    "buffer/reward_mean": Metric("reward", "Mean reward of the buffer's samples."),
    "buffer/reward_std": Metric("reward", "Population standard deviation of the rewards in the buffer."),
    "buffer/reward_min": Metric("reward", "Lowest reward in the buffer."),
    "buffer/reward_max": Metric("reward", "Highest reward in the buffer."),
    "buffer/response_tokens_mean": Metric("tokens", "Mean response length of the buffer's samples."),
    "buffer/response_tokens_min": Metric("tokens", "Shortest response in the buffer."),
    "buffer/response_tokens_max": Metric("tokens", "Longest response in the buffer."),
    "collector/reward_mean": Metric("reward", "Mean reward of the scored completions."),
    "collector/reward_std": Metric("reward", "Population standard deviation of their rewards."),
    "collector/reward_min": Metric("reward", "Lowest reward."),
    "collector/reward_max": Metric("reward", "Highest reward."),
    "collector/response_tokens_mean": Metric("tokens", "Mean response length, the end token included."),
    "collector/response_tokens_std": Metric("tokens", "Population standard deviation of the lengths."),
    "collector/response_tokens_min": Metric("tokens", "Shortest response."),
    "collector/response_tokens_max": Metric("tokens", "Longest response."),
    "collector/policy_version_mean": Metric("publishes", "Mean version of the weights that sampled."),
    "collector/policy_version_min": Metric("publishes", "Oldest version among them."),
    "collector/policy_version_max": Metric("publishes", "Newest version among them."),
    "collector/seconds_between_batches": Metric("s", "Time since the call before ended; absent in the first."),
    "collector/*": Metric("any", "What a logger of the user's own adds (logging.data_logger)."),
    "async/queue_length": Metric("collections", "Finished collections that still wait when this one is trained on."),
    "async/wait_seconds": Metric("s", "How long the trainer waited for this collection."),
    "async/reissued_turns": Metric("completions", "Completions so far that were too old and were sampled again."),
    "loss/total": Metric("nats", "What is minimised: main term plus coefficient times the KL term."),
    "loss/main": Metric("nats", "Main term: negative log-likelihood (sft), or the minor_sft objective."),
    "loss/kl_to_ref": Metric(
        "nats/token",
        "Mean of the k3 estimator over trained tokens: 0 at the reference; not an unbiased KL on selected samples.",
    ),
    "loss/kl_to_ref_coeff": Metric("1", "Coefficient of the KL term at this step."),
    "optim/grad_norm": Metric("1", "Global L2 norm of the gradient before clipping."),
    "optim/clipped_share": Metric("share", "Share of the steps so far whose gradient was clipped."),
    "optim/skipped_steps": Metric(
        "steps", "Steps so far that moved no weights, because loss or gradient was NaN or infinite."
    ),
    "optim/learning_rate": Metric("1", "Learning rate of this step."),
    "policy/version": Metric("publishes", "Publishes so far; the weights that a run starts from are version 0."),
    "policy/age_mean": Metric("publishes", "Mean age of the step's samples: publishes since they were sampled."),
    "policy/age_max": Metric("publishes", "Age of the step's oldest sample."),
    "policy/engine_log_prob_difference": Metric(
        "nats/token",
        "Mean absolute difference of the trainer's and the engine's log-probs on trained tokens, "
        "measured before the first step on samples of age 0.",
    ),
    "policy/canary_difference": Metric(
        "nats/token",
        "Mean absolute difference of the trainer's and a vLLM engine's log-probs on a few fixed prompts, after the "
        "last publish.",
    ),
    "train/weights_changed_share": Metric("share", "Share of the engine's weights that the publish changed."),
    "eval/accuracy": Metric("share", "Share of the held-out problems answered right; unscored answers count as wrong."),
    "eval/low": Metric("share", "Lower end of the 95% Wilson interval of the accuracy."),
    "eval/high": Metric("share", "Upper end of the 95% Wilson interval of the accuracy."),
    "eval/num_problems": Metric("problems", "Held-out problems answered."),
    "eval/unscored": Metric("problems", "Held-out problems whose answer could not be scored."),
    "eval/dropped_too_long": Metric("problems", "Held-out problems left out because they do not fit the context."),
    "eval/response_length_mean": Metric("tokens", "Mean length of the answers, the end token included."),
    "eval/truncated_share": Metric("share", "Share of the answers that the length limit cut."),
    "time/elapsed": Metric("s", "Since the log was opened; on every line."),
    "time/generate": Metric("s", "Engine: sampling completions."),
    "time/score": Metric("s", "Task: scoring completions."),
    "time/select": Metric("s", "Selection among completions."),
    "time/reference": Metric("s", "Reference log-probs of what was kept."),
    "time/train": Metric("s", "Optimizer steps."),
    "time/publish": Metric("s", "Sending weights to the engine and verifying them."),
    "time/verify": Metric("s", "Checking before a collection that the engine holds what was published."),
    "time/checkpoint": Metric("s", "Saving models."),
    "time/evaluate": Metric("s", "Greedy evaluation."),
    "perf/steps_per_second": Metric("steps/s", "Optimizer steps per second of time/train."),
    "perf/generation_tokens_per_second": Metric("tokens/s", "Sampled tokens per second of time/generate."),
    "perf/training_tokens_per_second": Metric(
        "tokens/s", "Prompt and response tokens trained per second of time/train."
    ),
    "memory/peak_gib": Metric(
        "GiB", "Most memory used so far: of the process on the CPU, allocated by torch on a GPU."
    ),
}


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError that lists the names the glossary does not hold."""
    unknown = [name for name in names if name not in GLOSSARY and f"{name.partition('/')[0]}/*" not in GLOSSARY]
    if unknown:
        raise ValueError(f"metrics without an entry in expert_iteration/metrics/glossary.py: {', '.join(unknown)}")


def markdown_tables() -> str:
    """One Markdown section with a table per group."""
    sections = []
    for group, sentence in GROUPS.items():
        rows = [
            f"| `{name}` | {metric.unit} | {metric.meaning} |"
            for name, metric in GLOSSARY.items()
            if name.startswith(f"{group}/")
        ]
        sections.append(
            "\n".join([f"### {group}", "", sentence, "", "| name | unit | meaning |", "| --- | --- | --- |", *rows])
        )
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    print(markdown_tables(), end="")
