"""A trainer that only takes the time: it leases, waits as long as a step would take, publishes the next version, over HTTP as any other.

`gateway` the calls, tried again through outages · `leaser` batches, those taken ahead too, and their leases · `feed` a backlog that never
runs dry · `weights` how generators come to a new version · `loop` the steps · `figures` what came of them · `command` for people.
"""

from service.trainer.command import run_trainer
from service.trainer.options import Pace, TrainerError, TrainerOptions

__all__ = ["Pace", "TrainerError", "TrainerOptions", "run_trainer"]
