"""Serves the metrics of a run for Prometheus, and answers probes, at `run.metrics_port`.

    /metrics    all figures, in the text format of Prometheus; names and units by its conventions
    /healthz    200 while the supervisor's loop turns, otherwise 503
    /readyz     200 once the learner has taken a step in this process, otherwise 503

A figure of a process has one series for each kind of role ("actor"), not for each process, and a
label's values are limited in number (`LABELS`), so that a run's series do not grow with its time.
The thread of the supervisor only stores the figures; threads of the server make the text of a
scrape. docs/prometheus.md explains the names, and `monitor/grafana/` has a
dashboard and alert rules that use them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from penstock.configs.errors import UserError
from penstock.core.formatting import finite
from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.core.notes import note_logger
from penstock.monitor import ranks
from penstock.monitor.figures import role_mean
from penstock.monitor.metric_groups import FALLBACK, group
from penstock.monitor.run_folder.events import KINDS
from penstock.monitor.run_folder.folder import highest_counters
from penstock.monitor.scrape_server import Page, ScrapeServer, plain
from penstock.profiling.histogram import upper_edge_s

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    from penstock.configs.schema import Config

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
HEALTHY_S = 10.0  # the longest time since the last turn of the supervisor's loop
# The most values of a label; figures of further ones are left out.
LABELS = 64
OTHER = "other"


class _Figure(NamedTuple):
    """A figure without labels: its name in a line of `metrics.jsonl`, its name here without
    `penstock_` and, for counters, without `_total`, and its meaning."""

    key: str
    name: str
    help: str


COUNTERS = (
    _Figure("env_steps", "env_steps", "Agent steps produced, as known to the learner."),
    _Figure("env_frames", "env_frames", "Frames of the produced agent steps."),
    _Figure("trained_steps", "trained_steps", "Agent steps trained, each counted once."),
    _Figure("learner_steps", "learner_steps", "Optimizer steps."),
    _Figure("episodes", "episodes", "Episodes that ended in training."),
    _Figure("time_s", "training_seconds", "Time of training, from the first unroll on."),
    _Figure("updates_skipped", "updates_skipped", "Updates skipped as a number was not finite."),
    _Figure("rollbacks", "rollbacks", "Returns to the last good state after such updates."),
)
REASONS = (
    _Figure("dropped", "dropped_steps", "Agent steps dropped by a rule of the config."),
    _Figure("lost", "lost_steps", "Agent steps lost with a process or a connection."),
    _Figure("rejected", "rejected_messages", "Messages from the network that were rejected."),
)
GAUGES = (
    _Figure("steps_per_s", "env_steps_per_second", "Agent steps produced per second."),
    _Figure("trained_steps_per_s", "trained_steps_per_second", "Agent steps trained per second."),
    _Figure(
        "learner_ceiling_steps_per_s",
        "learner_ceiling_steps_per_second",
        "Trained steps per second if data were always in place.",
    ),
    _Figure("episode_return_mean", "episode_return_mean", "Mean raw return, last episodes."),
    _Figure(
        "episode_return_all_mean",
        "episode_return_all_mean",
        "Mean raw return of all environments, where these explore at different rates.",
    ),
    _Figure("episode_length_mean", "episode_length_mean", "Mean length of these, in agent steps."),
    _Figure("policy_lag_mean", "policy_lag_mean", "Mean policy lag, in optimizer steps."),
    _Figure("policy_lag_max", "policy_lag_max", "Greatest policy lag, in optimizer steps."),
    _Figure("queue_fill", "queue_fill_ratio", "Share of slots that are filled and not yet freed."),
    _Figure("replay_size", "replay_steps", "Agent steps in the replay."),
    _Figure(
        "samples_per_insert", "replay_samples_per_insert", "Mean number of draws of a replay step."
    ),
    _Figure("eval_return_best", "evaluation_return_best", "Mean return of the best weights."),
    _Figure("eval_trained_steps", "evaluation_trained_steps", "Trained steps of its weights."),
)
MOMENTS = {
    "ready": "1 once the learner has taken a step, otherwise 0.",
    "last_metrics_timestamp_seconds": "When the last figures arrived.",
    "last_checkpoint_timestamp_seconds": "When the last checkpoint was written.",
}
ROLES = ("actor", "learner")  # roles whose processes are counted
STATISTICS = ("loss", "policy", "value", "optim", FALLBACK)  # groups of an algorithm's statistics
OWN = {figure.key for figure in (*COUNTERS, *REASONS, *GAUGES)}
# Figures that a learner takes from its checkpoint when it is restarted, so that they may fall.
RESTORED = (*ranks.COUNTERS, "time_s")
# Numbers of bins of `profiling.histogram`, whose ends are from 0.8 ms doubled up to 105 s.
LATENCY_BINS = tuple(range(12, 84, 4))
LAG_BOUNDS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)  # optimizer steps

logger = note_logger(__name__)


def make(config: Config, run_dir: Path) -> MetricSink:
    """Makes the sink of `run.metrics_port`.

    Raises:
        UserError: if the port cannot be used.
    """
    options = config.run
    labels = {
        "run": run_dir.absolute().name,
        "env": config.env.id,
        "algo": config.algo.name,
        "version": penstock.__version__,
    }

    try:
        return PrometheusSink(
            options.metrics_host,
            options.metrics_port or 0,
            about=labels,
            former=highest_counters(run_dir, RESTORED),
        )
    except OSError as error:
        raise UserError(
            f"run.metrics_port={options.metrics_port} cannot be used on {options.metrics_host}: "
            f"{error.strerror or error}; choose another port, or 0 for any free one"
        ) from error


class _Histogram:
    """Counts of a whole run, in buckets as Prometheus has them."""

    def __init__(self, bounds: Iterable[float], counts: Counter[int] | None = None) -> None:
        """``bounds``: the greatest value of each bucket, rising."""
        self._bounds = tuple(bounds)
        # By the number of the bucket; there is a last one without a bound.
        self._counts = Counter(counts)
        self.total = 0.0

    def add(self, value: float, count: float, total: float) -> None:
        """Add ``count`` observations in the bucket of ``value``; their sum is ``total``."""
        self._counts[bisect_left(self._bounds, value)] += count  # type: ignore[assignment]
        self.total += total

    def copy(self) -> _Histogram:
        """An independent copy."""
        copied = _Histogram(self._bounds, self._counts)
        copied.total = self.total
        return copied

    def buckets(self) -> list[tuple[str, float]]:
        """Returns for each bucket its bound as text, and how many observations are at most as
        large."""
        bounds = [*(format(bound, ".6g") for bound in self._bounds), "+Inf"]
        return [
            (bound, sum(self._counts[i] for i in range(number + 1)))
            for number, bound in enumerate(bounds)
        ]


@dataclass
class RunState:
    """What is known of a run: the newest value of each figure, and counts of all intervals."""

    last: dict[str, Any] = field(default_factory=dict)
    """The newest value of each figure, by its name in a line of `metrics.jsonl`."""
    events: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys((*KINDS, "evaluation", OTHER), 0))
    )
    """The number of events of each kind."""
    lag: _Histogram = field(default_factory=lambda: _Histogram(LAG_BOUNDS))
    """Policy lags of trained steps, in optimizer steps."""
    latency: _Histogram = field(default_factory=lambda: _Histogram(map(upper_edge_s, LATENCY_BINS)))
    """Latencies of trained steps, in seconds."""
    metrics_s: float = 0.0
    """When the last figures arrived, in seconds since 1970; 0: never."""
    checkpoint_s: float = 0.0
    """When the last checkpoint was written."""
    ready: bool = False
    """Whether the learner has taken a step."""

    def update_last(self, metrics: Json) -> None:
        """Replace the figures of ``metrics`` by their newest values.

        A learner that is restarted from a checkpoint sets the counters of the run back. Prometheus
        would take a smaller counter for one that has counted from 0 again, so these counters keep
        their value until the run exceeds it.
        """
        previous = {name: finite(self.last.get(name)) for name in RESTORED}
        self.last |= metrics
        for name, value in previous.items():
            if value:
                self.last[name] = max(value, finite(self.last.get(name)) or 0)

    def add_interval(self, metrics: Json) -> None:
        """Add the figures of an interval that has ended now."""
        self.update_last(metrics)
        self.metrics_s = time.time()
        compute_share = (metrics.get("ledger") or {}).get("compute")
        self.ready |= bool(compute_share and metrics.get("learner_steps"))

        for lag, steps in _numbers(metrics.get("policy_lag_histogram")):
            self.lag.add(lag, steps, lag * steps)

        # The single latencies of a bin are unknown, so its middle stands for their mean. A value
        # just below the end of the bin falls into the right bucket also after rounding.
        for bin_, steps in _numbers(metrics.get("latency_histogram")):
            longest_s = upper_edge_s(bin_)
            shortest_s = upper_edge_s(bin_ - 1) if bin_ else 0.0
            middle_s = (longest_s + shortest_s) / 2
            self.latency.add(longest_s * (1 - 1e-9), steps, middle_s * steps)

    def on_event(self, event: RunEvent) -> None:
        """Count an event of the run; the time of a checkpoint is kept."""
        self.events[event.kind if event.kind in self.events else OTHER] += 1
        if event.kind == "checkpoint" and not event.reported:
            self.checkpoint_s = time.time()

    def copy(self) -> RunState:
        """Returns an independent copy; the values of figures are never changed, so they are
        shared."""
        return replace(
            self,
            last={**self.last},
            events=Counter(self.events),
            lag=self.lag.copy(),
            latency=self.latency.copy(),
        )


class PrometheusSink(MetricSink):
    """The newest figures of a run, and the server that offers them.

    The thread of the supervisor calls the methods of a sink; threads of the server call `_page`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        about: Mapping[str, str],
        former: Mapping[str, float] | None = None,
    ) -> None:
        """Serve the figures at ``port`` of ``host``.

        Args:
            host: the address to listen at.
            port: 0 lets the system choose one.
            about: labels of `penstock_run_info`.
            former: figures of `RESTORED` that earlier processes of the run have reached.

        Raises:
            OSError: the port cannot be used.
        """
        self._about = dict(about)
        self._host = host
        self._lock = threading.Lock()  # held while `_state` is read or changed
        self._state = RunState({**(former or {})})
        self._ticked_s = time.monotonic()
        self._announced = False
        # The last line: from here on requests are answered.
        self._server = ScrapeServer(host, port, self._page)

    @property
    def url(self) -> str:
        """The address of the metrics."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.port}/metrics"

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Add the figures of an interval; final ones replace single figures only."""
        with self._lock:
            if final:
                self._state.update_last(metrics)
            else:
                self._state.add_interval(metrics)

    def event(self, event: RunEvent) -> bool:
        with self._lock:
            self._state.on_event(event)
        return False

    def tick(self) -> None:
        self._ticked_s = time.monotonic()
        if not self._announced:
            self._announced = True
            logger.info(f"metrics are served at {self.url}")

    def close(self) -> None:
        self._server.close()

    def _page(self, path: str) -> Page:
        """The answer to a request; called in a thread of the server."""
        if path == "/metrics":
            return Page(HTTPStatus.OK, TEXT_FORMAT, self._exposition())
        if path == "/healthz":
            silent_s = time.monotonic() - self._ticked_s
            text = f"the supervisor's loop has not turned for {silent_s:.0f} s"
            return _probe(silent_s <= HEALTHY_S, text)
        if path == "/readyz":
            return _probe(self._state.ready, "the learner has not taken a step yet")
        return plain(HTTPStatus.NOT_FOUND, "only /metrics, /healthz and /readyz are served")

    def _exposition(self) -> bytes:
        """The text of all figures, made of a copy: the thread of the supervisor does not wait."""
        with self._lock:
            state = self._state.copy()
        return exposition(state, self._about)


def _probe(good: bool, reason: str) -> Page:
    """Returns the answer to a probe; ``reason`` is its text if the state is not good."""
    return plain(HTTPStatus.OK, "ok") if good else plain(HTTPStatus.SERVICE_UNAVAILABLE, reason)


def exposition(state: RunState, about: Mapping[str, str]) -> bytes:
    """Returns all figures in the text format of Prometheus.

    Args:
        state: what is known of the run.
        about: labels of `penstock_run_info`.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import InfoMetricFamily

    class Families:
        """The figures, as families of series."""

        def collect(self) -> Iterator[Metric]:
            yield InfoMetricFamily("penstock_run", "The run.", value=dict(about))
            yield from _counters(state)
            yield from _gauges(state)
            yield from _histograms(state)

    registry = CollectorRegistry()
    registry.register(Families())
    text: bytes = generate_latest(registry)
    return text


def _counters(state: RunState) -> Iterator[Metric]:
    """Yields the families that only rise: those of a single series, then those with a label."""
    from prometheus_client.core import CounterMetricFamily

    last = state.last
    for figure in COUNTERS:
        if (value := finite(last.get(figure.key))) is not None:
            yield CounterMetricFamily(f"penstock_{figure.name}", figure.help, value)

    received = last.get("received") or {}
    received_nbytes = {form: received.get(f"{form}_nbytes") for form in ("raw", "coded")}
    restarts = {role: last.get(f"{role}s_restarted", 0) for role in ROLES}
    received_help = "Received over the network: raw, and coded as sent."
    for name, help_text, label, counts in (
        *((figure.name, figure.help, "reason", last.get(figure.key)) for figure in REASONS),
        ("received_bytes", received_help, "form", received_nbytes),
        ("restarts", "Restarts of processes that failed.", "role", restarts),
        ("events", "Events of the run.", "kind", state.events),
    ):
        yield _labelled(CounterMetricFamily(f"penstock_{name}", help_text, labels=[label]), counts)


def _gauges(state: RunState) -> Iterator[Metric]:
    """Yields the families of the newest values: of a single series, with a label, and the shares of
    time with two."""
    from prometheus_client.core import GaugeMetricFamily

    last = state.last
    for figure in GAUGES:
        if (value := finite(last.get(figure.key))) is not None:
            yield GaugeMetricFamily(f"penstock_{figure.name}", figure.help, value)

    moments = {
        "ready": float(state.ready),
        "last_metrics_timestamp_seconds": state.metrics_s or None,
        "last_checkpoint_timestamp_seconds": state.checkpoint_s or None,
    }
    for name, moment in moments.items():
        if (value := finite(moment)) is not None:
            yield GaugeMetricFamily(f"penstock_{name}", MOMENTS[name], value)

    alive = {role: last.get(f"{role}s_alive") for role in ROLES}
    returns = {play: last.get(f"eval_return_{play}") for play in ("greedy", "sampled")}
    cores = {role: _total(processes) for role, processes in _by_role(last.get("cpu")).items()}
    statistics = {
        name: value for name, value in last.items() if name not in OWN and group(name) in STATISTICS
    }
    for name, help_text, label, values in (
        ("processes_alive", "Processes that work.", "role", alive),
        ("evaluation_return_mean", "Mean raw return of the last evaluation.", "play", returns),
        ("learner_time_ratio", "Parts of the learner's clock.", "part", last.get("ledger")),
        ("role_cpu_cores", "Processor seconds per second of all processes.", "role", cores),
        ("statistic", "Losses and statistics, named as in metrics.jsonl.", "name", statistics),
    ):
        yield _labelled(GaugeMetricFamily(f"penstock_{name}", help_text, labels=[label]), values)

    help_text = "Parts of the main thread's clock, mean over the processes of a role."
    family = GaugeMetricFamily("penstock_role_time_ratio", help_text, labels=["role", "part"])
    ledgers = last.get("ledgers") or {}
    for role in _by_role(ledgers):
        for part, share in _series(role_mean(ledgers, role)):
            family.add_metric([role, part], share)
    yield family


def _histograms(state: RunState) -> Iterator[Metric]:
    """Yields the families of distributions over the whole run."""
    from prometheus_client.core import HistogramMetricFamily

    lag_help = "Policy lag of each trained step, in optimizer steps."
    latency_help = "From an environment's step to its gradient."
    for name, help_text, histogram in (
        ("policy_lag", lag_help, state.lag),
        ("sample_latency_seconds", latency_help, state.latency),
    ):
        buckets = histogram.buckets()
        yield HistogramMetricFamily(f"penstock_{name}", help_text, buckets, histogram.total)


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, Any] | None
) -> Metric:
    """Adds to a family with one label a series for each number of ``values``; returns it."""
    for label_value, number in _series(values):
        family.add_metric([label_value], number)
    return family


def _series(values: Mapping[str, Any] | None) -> Iterator[tuple[str, float]]:
    """Returns the known numbers by the value of their label, at most `LABELS` of them."""
    numbers = ((label, finite(value)) for label, value in (values or {}).items())
    known = ((label, number) for label, number in numbers if number is not None)
    return islice(known, LABELS)


def _by_role(values: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Returns figures of processes by the kind of their role, "actor" for "actor-3".

    Kinds beyond `LABELS` are left out.
    """
    roles: dict[str, dict[str, Any]] = {}
    for process, value in (values or {}).items():
        role = process.rpartition("-")[0] or process
        if role in roles or len(roles) < LABELS:
            roles.setdefault(role, {})[process] = value
    return roles


def _total(values: Mapping[str, Any]) -> float:
    """Returns the sum of the values that are numbers."""
    return sum(number for number in map(finite, values.values()) if number is not None)


def _numbers(histogram: Mapping[str, float] | None) -> Iterator[tuple[int, float]]:
    """Yields number and count of the bins of a histogram in a line of `metrics.jsonl`."""
    return ((int(key), count) for key, count in (histogram or {}).items())
