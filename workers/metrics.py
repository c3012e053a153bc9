"""What a worker counts. Labels are bounded: never an id, never a name that a model or a client chose."""

from prometheus_client import Counter, Histogram

turns = Counter("rollway_turns_total", "Turns generated and parsed")
tokens = Counter("rollway_sampled_tokens_total", "Tokens sampled, partial turns included")
rollouts = Counter("rollway_rollouts_total", "Rollouts ended", ["outcome", "stop_reason"])
restarts = Counter("rollway_attempts_ended_total", "Attempts that ended before their rollout did", ["reason"])
leaks = Counter("rollway_sandbox_removals_failed_total", "Sandboxes left to the sweep")
swept = Counter("rollway_sandboxes_swept_total", "Sandboxes of dead owners destroyed by the sweep")
lost_leases = Counter("rollway_leases_lost_total", "Rollout leases that ran out or were taken over")

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
generate_seconds = Histogram("rollway_generate_seconds", "Wall time of one generation call", buckets=_SECONDS)
tool_seconds = Histogram("rollway_tool_seconds", "Wall time of one tool call", buckets=_SECONDS)
sandbox_seconds = Histogram("rollway_sandbox_start_seconds", "Wall time from the create call to readiness", buckets=_SECONDS)

_CLASSES = ("generator", "sandbox", "verifier", "task", "misaligned tokens", "internal")


def reason_class(reason: str) -> str:
    """The bounded class of a reason: what stands before its colon, when it is one of ours."""
    head = reason.partition(":")[0]
    if head == "sandbox_destroyed":
        return "sandbox"
    return head if head in _CLASSES else "other"
