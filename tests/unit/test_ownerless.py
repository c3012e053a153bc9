"""Which sandboxes a sweep takes: never what is kept, by name, by prefix or by its age."""

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.base import SandboxInfo
from sandboxes.ownerless import ownerless

NAMES = [f"{prefix}-{number}" for prefix in ("pool-a", "pool-b", "rollout") for number in range(3)]
names = st.frozensets(st.sampled_from(NAMES))


def box(name: str, age_s: float) -> SandboxInfo:
    return SandboxInfo(id=name, name=name, labels={}, age_s=age_s, alive=True)


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(0, 100)), names, st.floats(0, 100), st.none() | names, st.booleans())
def test_who_is_taken(
    ages: dict[str, float], keep: frozenset[str], older_than_s: float, only: frozenset[str] | None, a_lives: bool
) -> None:
    prefixes = ("pool-a-",) if a_lives else ()
    found = [box(name, age_s) for name, age_s in ages.items()]
    taken = {info.name for info in ownerless(found, keep=keep, older_than_s=older_than_s, keep_prefixes=prefixes, only=only)}
    looked_at = set(ages) if only is None else set(ages) & only
    warm = {name for name in ages if name.startswith("pool-a-") and a_lives}
    young = {name for name, age_s in ages.items() if age_s < older_than_s}
    assert taken == looked_at - keep - warm - young
