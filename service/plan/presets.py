"""Four runs of which figures were published (SemiAnalysis, June 2026), as settings. What was not published is assumed, and named."""

from dataclasses import dataclass

from service.plan.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """published, assumed: which of the options are which. compare: what the run itself varied."""

    about: str
    options: Options
    published: str
    assumed: str
    compare: tuple[str, ...] = ()


PRESETS = {
    "long-responses": Preset(
        about="235B thinking model, 24 generators of 8 GPUs, 64 GPUs train; long answers early in training",
        options=Options(
            concurrency=1536,
            generators=24,
            latency_s=590.0,
            consumption=2.75,
            group_size=16,
            groups_per_step=32,
            staleness_budget=16,
            acceptance=0.75,
            mean_tokens=14_000,
            tail=2.0,
            max_tokens=32_768,
            tool_s=15.0,
            sandbox_cpus=2,
            sandbox_memory_mib=4096,
        ),
        published="consumption 2.75 and delivered 1.95 samples/s, wait 30 %, 405 to 690 s a sample, 32 x 16 a step, budget 16, 32K tokens",
        assumed="1,536 in flight (the recipe of its framework), mean length, tail multiplier 2, acceptance such that 1.95 are delivered",
    ),
    "tool-use": Preset(
        about="GLM-5, 2 generators of 64 GPUs, 128 GPUs train; easy tasks with many tool calls",
        options=Options(
            concurrency=1536,
            generators=2,
            latency_s=1150.0,
            consumption=2.3,
            group_size=16,
            groups_per_step=32,
            staleness_budget=16,
            acceptance=0.45,
            mean_tokens=18_000,
            tail=2.0,
            max_tokens=65_536,
            tool_s=15.0,
            sandbox_cpus=2,
            sandbox_memory_mib=4096,
        ),
        published="55 % of tasks always solved, wait 74 %, 370 to 1,950 s a sample, 7K to 28K tokens, 32 x 16 samples a step, budget 16",
        assumed="1,536 in flight, tail multiplier 2, consumption such that the wait is 74 % (the published factor of 5 would make it 80 %)",
    ),
    "sandbox-scaling": Preset(
        about="235B model, 6 generators of 4 GPUs, hosted sandboxes; rollouts in flight raised until sandbox starts give way",
        options=Options(
            concurrency=360,
            generators=6,
            tokens_per_s=9.0,
            consumption=0.72,
            group_size=8,
            groups_per_step=16,
            staleness_budget=8,
            mean_tokens=7_600,
            sigma=0.9,
            max_tokens=131_072,
            sandbox_s=20.0,
            sandbox_sigma=0.5,
            max_starting=8,
            tool_s=60.0,
            tool_sigma=0.8,
        ),
        published="groups of 8, 96, 256 and 360 in flight (96 to 960 tried), wait 30 to 60 %, starts of up to an hour at 960, 128K tokens",
        assumed="batch, budget, lengths and times; the account's limit as 8 sandboxes starting at once",
        compare=("concurrency=96,256,360,960",),
    ),
    "partial-rollouts": Preset(
        about="235B thinking model, 8 generators of 8 GPUs, 32 GPUs train; weights pushed every 5 steps into running rollouts",
        options=Options(
            concurrency=256,
            generators=8,
            latency_s=600.0,
            consumption=1.06,
            group_size=8,
            groups_per_step=8,
            steps_per_version=5,
            staleness_budget=2,
            mean_tokens=12_000,
            sigma=0.5,
            max_tokens=32_768,
            update_s=30.0,
            sandbox_s=5.0,
            tool_s=60.0,
            tool_sigma=0.5,
        ),
        published="batch 64 in groups of 8, weights every 5 steps, 12K tokens and 12 tool calls a rollout, 32K tokens at most, wait 60 %",
        assumed="256 in flight, budget, times and tail; consumption such that the wait is 60 %",
        compare=("steps_per_version=1,2,5",),
    ),
}
