"""The seams of Penstock: every Protocol that an extension implements, with the order of the calls.

An implementation lives in the room named below and is registered there in one place; a contract
test runs over all implementations of a seam. torch is imported here for types only.

| seam | file | implemented in | registered in |
|---|---|---|---|
| `DataSource` | `data_source.py` | `learner/sources/` | `learner.role.make_source` |
| `Algorithm`, `Update` | `algorithm.py` | `algos/` | `algos.registry` |
| `GradientSync` | `gradient_sync.py` | `learner/sync/` | by its pace |
| `Pace` | `pace.py` | `learner/sync/` | `learner.sync.registry` |
| `Optimizer` | `optimizer.py` | `learner/optimizers/` | `learner.optimizers.registry` |
| `Codec` | `codec.py` | `learner/codecs/` | `learner.codecs.registry` |
| `Transport`, `Link`, `Connector` | `transport.py` | `transport/` | `transport.registry` |
| `Inference` | `inference.py` | `models/acting/` | `algos.acting.make_inference` |
| `Environments` | `environments.py` | `envs/`, `actors/` | `actors.matches.make_environments` |
| `Recorder` | `recorder.py` | `algos/` | `algos.recorded` |
| `MetricSink` | `metric_sink.py` | `monitor/` | `monitor.registry` |
| `Engine`, `Handle` | `engine.py` | `launch/engines/` | `launch.engines.registry` |

Paces, optimizers and codecs that few runs need lie in `learner/extras/`, each room with a registry
of its own.

A learner's loop (`learner.loop`) calls source and update in this order, in one thread:

    batch = source.next(timeout_s)                    # None: this learner has no batch in this turn
    plan = update.plan_updates(batch)
    totals = the sum of plan.counts over all learners
    result = update.step(batch, plan, totals, hooks)  # also without a batch, if others have one
    source.release(batch, result)                     # in the order of `next`, at any later time
"""

from penstock.core.interfaces.algorithm import Algorithm as Algorithm
from penstock.core.interfaces.algorithm import B_contra as B_contra
from penstock.core.interfaces.algorithm import BatchPlan as BatchPlan
from penstock.core.interfaces.algorithm import Share as Share
from penstock.core.interfaces.algorithm import StepHooks as StepHooks
from penstock.core.interfaces.algorithm import Update as Update
from penstock.core.interfaces.codec import AdamState as AdamState
from penstock.core.interfaces.codec import Bucket as Bucket
from penstock.core.interfaces.codec import Codec as Codec
from penstock.core.interfaces.codec import CodecContext as CodecContext
from penstock.core.interfaces.codec import CodecFactory as CodecFactory
from penstock.core.interfaces.codec import Collective as Collective
from penstock.core.interfaces.codec import GradientPart as GradientPart
from penstock.core.interfaces.data_source import B as B
from penstock.core.interfaces.data_source import Dataset as Dataset
from penstock.core.interfaces.data_source import DataSource as DataSource
from penstock.core.interfaces.data_source import DataSpec as DataSpec
from penstock.core.interfaces.data_source import HostValues as HostValues
from penstock.core.interfaces.data_source import Relabel as Relabel
from penstock.core.interfaces.data_source import SampleSpec as SampleSpec
from penstock.core.interfaces.data_source import StepResult as StepResult
from penstock.core.interfaces.data_source import TrainingBatch as TrainingBatch
from penstock.core.interfaces.data_source import Transitions as Transitions
from penstock.core.interfaces.data_source import TransitionSequences as TransitionSequences
from penstock.core.interfaces.data_source import Unrolls as Unrolls
from penstock.core.interfaces.engine import Bundle as Bundle
from penstock.core.interfaces.engine import Engine as Engine
from penstock.core.interfaces.engine import EngineContext as EngineContext
from penstock.core.interfaces.engine import EngineFactory as EngineFactory
from penstock.core.interfaces.engine import Handle as Handle
from penstock.core.interfaces.engine import Liveness as Liveness
from penstock.core.interfaces.engine import RoleStatus as RoleStatus
from penstock.core.interfaces.engine import RoleUsage as RoleUsage
from penstock.core.interfaces.engine import ThreadUsage as ThreadUsage
from penstock.core.interfaces.environments import Environments as Environments
from penstock.core.interfaces.gradient_sync import GradientSync as GradientSync
from penstock.core.interfaces.gradient_sync import SharedOptimizer as SharedOptimizer
from penstock.core.interfaces.inference import Inference as Inference
from penstock.core.interfaces.inference import ReadPolicy as ReadPolicy
from penstock.core.interfaces.inference import ReadWeights as ReadWeights
from penstock.core.interfaces.metric_sink import Json as Json
from penstock.core.interfaces.metric_sink import MetricSink as MetricSink
from penstock.core.interfaces.metric_sink import RunEvent as RunEvent
from penstock.core.interfaces.metric_sink import SinkFactory as SinkFactory
from penstock.core.interfaces.optimizer import FrozenVarianceFactory as FrozenVarianceFactory
from penstock.core.interfaces.optimizer import FrozenVarianceOptimizer as FrozenVarianceOptimizer
from penstock.core.interfaces.optimizer import Optimizer as Optimizer
from penstock.core.interfaces.optimizer import OptimizerContext as OptimizerContext
from penstock.core.interfaces.optimizer import OptimizerFactory as OptimizerFactory
from penstock.core.interfaces.optimizer import UpdateStep as UpdateStep
from penstock.core.interfaces.pace import Pace as Pace
from penstock.core.interfaces.pace import PaceFactory as PaceFactory
from penstock.core.interfaces.recorder import Recorder as Recorder
from penstock.core.interfaces.recorder import Step as Step
from penstock.core.interfaces.transport import Connector as Connector
from penstock.core.interfaces.transport import LearnerGoneError as LearnerGoneError
from penstock.core.interfaces.transport import LearnerInfo as LearnerInfo
from penstock.core.interfaces.transport import Link as Link
from penstock.core.interfaces.transport import RunOverError as RunOverError
from penstock.core.interfaces.transport import SlotProcessor as SlotProcessor
from penstock.core.interfaces.transport import Transport as Transport
from penstock.core.interfaces.transport import UnknownPolicyError as UnknownPolicyError
from penstock.core.interfaces.transport import Welcome as Welcome
