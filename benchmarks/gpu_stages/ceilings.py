"""The learner's update on a batch that lies on the device, beside plain torch.

Both compute in bf16, forward, backward and Adam. The learner's network is eager and compiled. Plain
torch has a batch of stacked frames in one pass, in channels_last: eager, compiled, replayed as a
CUDA graph, and both. The fastest of each counts. Rates are those of rows through the network: an
unroll of 20 agent steps has 21.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_stages.batches import PASSES, settings
from gpu_stages.finding import Finding, Options
from penstock.bench import ceiling
from penstock.bench.bare import captured, one_behind
from penstock.bench.rates import rounds_of
from penstock.configs.load import resolve
from penstock.device.choice import device_of

ACTIONS, CHANNELS, FRAME = 2, 4, 84
SMALL_ROWS = 8
WARM_UPS = 3

Form = Callable[[], object]


def run(options: Options) -> Iterator[Finding]:
    own: dict[str, float] = {}
    for network in PASSES:
        own[network] = learner(network, options)
        torch.cuda.empty_cache()
        yield Finding(f"{network}: learner, rows/s", own[network])
        if not options.small:
            name = f"{network}: learner, compiled, rows/s"
            try:
                faster = learner(network, options, "learner.compile=true")
            except Exception as error:  # a machine may lack a compiler
                yield Finding(name, None, reason(error))
            else:
                yield Finding(name, faster)
                own[network] = max(own[network], faster)
            torch.cuda.empty_cache()
    plain: dict[str, dict[str, float]] = {network: {} for network in PASSES}
    for (form, make), network in itertools.product(FORMS.items(), PASSES):
        if options.small and form != "eager":
            continue
        name = f"{network}: plain torch, {form}, rows/s"
        try:
            plain[network][form] = rate(make(one_pass(network, options)), options, network)
        except Exception as error:  # go on with the other forms
            yield Finding(name, None, reason(error))
        else:
            yield Finding(name, plain[network][form])
        torch.cuda.empty_cache()
    for network, rates in plain.items():
        if rates:
            yield Finding(f"{network}: learner / plain torch", own[network] / max(rates.values()))


def reason(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def learner(network: str, options: Options, *further: str) -> float:
    """Rows per second of `penstock.bench`'s ceiling; ``further`` options may follow."""
    config = resolve("synthetic", [*settings(network, options), *further])
    work = ceiling.work(config)
    found = rounds_of({"": work}, options.seconds)[""]
    steps = statistics.median(one.rate for one in found)
    return steps * (config.actors.unroll + 1) / config.actors.unroll


def one_pass(network: str, options: Options) -> tuple[Form, torch.optim.Optimizer]:
    """A function that adds the gradients of one batch, and the optimizer."""
    device = torch.device(options.place)
    net = NETWORKS[network]().to(device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    graphable = device.type == "cuda"
    optimizer = torch.optim.Adam(net.parameters(), fused=True, capturable=graphable)
    shape = (rows(network, options), CHANNELS, FRAME, FRAME)
    frames = torch.randint(256, shape, dtype=torch.uint8, device=device)

    def loss() -> Tensor:
        images = frames.to(torch.bfloat16, memory_format=torch.channels_last) / 255
        with torch.autocast(device.type, torch.bfloat16):
            outputs: Tensor = net(images)
        return outputs.float().square().mean()

    return loss, optimizer


def eager(made: tuple[Form, torch.optim.Optimizer]) -> Form:
    loss, optimizer = made

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[attr-defined]
        optimizer.step()

    return step


def compiled(made: tuple[Form, torch.optim.Optimizer]) -> Form:
    loss, optimizer = made
    return eager((torch.compile(loss), optimizer))


def graph(made: tuple[Form, torch.optim.Optimizer]) -> Form:
    return captured(eager(made))


def compiled_graph(made: tuple[Form, torch.optim.Optimizer]) -> Form:
    return captured(compiled(made))


def rate(step: Form, options: Options, network: str) -> float:
    """Rows per second."""
    device = device_of(torch.device(options.place))
    paced = one_behind(step, device)
    for _ in range(WARM_UPS):
        paced()
    device.synchronize()
    steps, began_s = 0, time.perf_counter()
    while steps == 0 or time.perf_counter() < began_s + options.seconds / 2:
        paced()
        steps += 1
    device.synchronize()
    return steps * rows(network, options) / (time.perf_counter() - began_s)


def rows(network: str, options: Options) -> int:
    """Of a pass."""
    return SMALL_ROWS if options.small else PASSES[network]


def nature_cnn() -> nn.Module:
    """With policy and value."""
    return nn.Sequential(
        nn.Conv2d(CHANNELS, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, ACTIONS + 1),
    )  # fmt: skip


class Residual(nn.Module):
    """``x + conv(relu(conv(relu(x))))``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        changed: Tensor = self.second(F.relu(self.first(F.relu(frames))))
        return frames + changed


def impala_cnn() -> nn.Module:
    """The residual network of IMPALA with policy and value."""
    sections: list[nn.Module] = []
    for entering, channels in ((CHANNELS, 16), (16, 32), (32, 32)):
        conv = nn.Conv2d(entering, channels, 3, padding=1)
        sections += [conv, nn.MaxPool2d(3, 2, 1), Residual(channels), Residual(channels)]
    heads = (nn.ReLU(), nn.Flatten(), nn.Linear(32 * 11 * 11, 256), nn.ReLU())
    return nn.Sequential(*sections, *heads, nn.Linear(256, ACTIONS + 1))


NETWORKS = {"nature_cnn": nature_cnn, "impala_cnn": impala_cnn}
# Graphs come last: a capture that fails may spoil what is measured after it.
FORMS = {"eager": eager, "compiled": compiled, "graph": graph, "compiled graph": compiled_graph}
