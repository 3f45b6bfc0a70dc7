"""What a supervisor reports of a run whose learner has sent no final report."""

from __future__ import annotations

from penstock.core.interfaces import Json, MetricSink, RoleStatus, RunEvent
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.run_report import RunReport
from penstock.launch.shutdown import StopCause
from penstock.launch.supervisor_messages import Failure

LEARNER = RoleSpec("learner", 0, "m:f", Stage.LEARNER)
ACTOR = RoleSpec("actor", 0, "m:f", Stage.ACTORS)


class RecordingSink(MetricSink):
    """Keeps the last metrics and the texts of events."""

    def __init__(self) -> None:
        self.last: Json = {}
        self.texts: list[str] = []

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        self.last = metrics

    def event(self, event: RunEvent) -> bool:
        self.texts.append(event.text)
        return False


def ended(produced: int, trained: int = 0, played: int = 0) -> RoleStatus:
    return RoleStatus(
        began=True,
        incarnation=0,
        phase="stopping",
        phase_s=0.0,
        alive_s=0.0,
        produced_steps=produced,
        sequence=0,
        played_steps=played,
        trained_steps=trained,
        reduction=0,
        dropped_nbytes=0,
    )


def test_the_known_part_of_the_accounting_is_reported() -> None:
    sink = RecordingSink()
    report = RunReport(sink, [LEARNER])
    report.metrics({"dropped": {"stale": 20}, "lost": {}}, {"actors_alive": 1}, final=False)
    report.add_progress(ACTOR, ended(produced=130, played=130))
    report.add_progress(LEARNER, ended(produced=120, trained=100))
    report.report_accounting()
    assert sink.last["accounting"] == {
        "produced": 130,
        "trained": 100,
        "dropped": {"stale": 20},
        "lost": {},
        "in_flight": None,
    }
    assert not sink.last["accounting_complete"]


def test_a_run_with_a_final_report_is_not_accounted_again() -> None:
    sink = RecordingSink()
    report = RunReport(sink, [LEARNER])
    report.add_progress(LEARNER, ended(produced=120, trained=100))
    report.metrics({"accounting": {}}, {}, final=True)
    report.report_accounting()
    assert sink.last == {"accounting": {}}


def test_a_count_is_an_event_when_it_grows() -> None:
    sink = RecordingSink()
    report = RunReport(sink, [LEARNER])
    for total in (0, 3, 3, 4):
        report.metrics({"dropped": {"stale": total}}, {}, final=False)
    assert sink.texts == ["agent steps were dropped: stale"] * 2


def test_a_stop_is_reported_once_with_its_failure() -> None:
    sink = RecordingSink()
    report = RunReport(sink, [])
    cause = StopCause("fault", Failure("actor-0", "broke", place="game.py:8, in step", log="a.log"))
    for _ in range(2):
        report.log_stop(cause)
    assert sink.texts == [
        "the run stops: fault; actor-0: broke (game.py:8, in step); traceback in a.log"
    ]
