"""The lockstep mode: actors and learner take turns in one process, and the same run comes out.

Every turn each actor plays one unroll with the newest weights, then the learner trains on them.
Nothing depends on timing, so the same config gives the same run, bit for bit. Environments cannot
be saved in general: at every checkpoint by steps they begin anew, seeded by the step count, and so
does a resumed run. 100 steps, resume and 100 more equal 200, where `checkpoint.every_steps` divides
100.
"""

from __future__ import annotations

from penstock.actors.main import Player
from penstock.configs.schema import Config
from penstock.core.role import RoleContext
from penstock.envs import make
from penstock.learner.session import Session
from penstock.replay import Accounting, TrajectoryQueue
from penstock.transport.inproc import InprocLink
from penstock.transport.shm.store import SlotStore
