"""The network of a target in plain torch, as a limit for the stages `inference` and `learner`.

These stages run this package's code, so an ideal made of them does not show what that code loses.
Here the same layers are modules of `torch.nn`, in the fastest of the number formats, memory layouts
and pass sizes that are tried on this machine. Small passes on a GPU are bound by kernel launches,
so there a pass is a whole update, a half or a quarter of it, and the fastest form is also tried
with `torch.compile`, as a CUDA graph, and with both. Learning is the forward and backward pass
alone: without loss, optimizer and the normaliser of observations.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.algos.samples import network_shape
from penstock.bench.rates import Work, as_json, rounds_of
from penstock.configs.schema import Config
from penstock.core.machine import processor
from penstock.device.choice import device_of, pick_device
from penstock.device.interface import Device
from penstock.envs import probe
from penstock.models.general import ActorCriticHeads, GeneralShape, channels_last
from penstock.models.layout import CONVS, FEATURES, CnnShape, MlpShape, flat_features
from penstock.models.torch_encoders import IMPALA_CHANNELS, IMPALA_FEATURES, ConvSection
from penstock.models.torch_setup import set_up_torch

PASS_ROWS = (64, 160, 256, 512)  # numbers of observations in one pass that a learner on a CPU tries
PARTS = (1, 2, 4)  # numbers of passes in one update that a learner on a GPU tries
TRIALS = 4  # timed calls of each form; the fastest counts, as other work only lengthens times
WARM_UPS = 3  # calls before a graph is captured, since nothing may be set up during the capture


class Form(NamedTuple):
    """One way to compute a network."""

    bf16: bool
    channels_last: bool
    rows: int
    """Observations in one pass."""
    compiled: bool = False
    """Whether `torch.compile` compiles the network."""
    graph: bool = False
    """Whether a captured CUDA graph is replayed."""

    def __str__(self) -> str:
        names = ("channels_last", "compiled", "graph")
        flags = "".join(f", {name}" for name in names if getattr(self, name))
        return f"{'bf16' if self.bf16 else 'fp32'}{flags}, {self.rows} rows"


def rounds(config: Mapping[str, Any], stage: str, seconds: float) -> dict[str, Any]:
    """Measure ``stage``, `bare_inference` or `bare_learner`, for about ``seconds``.

    Returns:
        The rounds as `rates.as_json` has them, in agent steps; the chosen form as ``note``; and
        whether a GPU computed, as ``on_gpu``. An empty dictionary where the network has no bare
        form (`BareNetwork.of`).
    """
    settings = Config.model_validate(config)
    learns = stage == "bare_learner"
    set_up_torch(settings.learner.first_threads if learns else settings.actors.threads)

    network = BareNetwork.of(settings, on_learner=learns)
    if network is None:
        return {}

    if learns:
        form = network.fastest(pass_rows(settings, network), learns=True)
        # The algorithm trains on each agent step in so many epochs.
        steps = form.rows / settings.algo.passes
    else:
        form = network.fastest((settings.actor_envs,), learns=False)
        steps = form.rows

    work = Work(network.work(form, learns=learns), steps, network.settle)
    figures = as_json(rounds_of({stage: work}, seconds)[stage])
    return figures | {"note": str(form), "on_gpu": network.on_gpu}


def pass_rows(config: Config, network: BareNetwork) -> tuple[int, ...]:
    """Returns the numbers of observations in one pass that a learner tries."""
    if not network.on_gpu:
        return PASS_ROWS

    learner = config.learner
    batch = config.actor_envs * config.actors.unroll * learner.batch_slots
    return tuple(max(1, batch // learner.updates_per_batch // part) for part in PARTS)


class BareNetwork:
    """A network of plain torch modules, with made-up observations for it."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...], scale: float, device: torch.device):
        """Move ``net`` to ``device``.

        Args:
            net: the network; it takes floats and returns the outputs with the value last.
            shape: the shape of one observation.
            scale: the factor on bytes of an observation before the network takes them.
            device: the device that computes.
        """
        self._net = net.to(device)
        self._shape = shape
        self._scale = scale
        self._device = device
        self.settle = device_of(device).synchronize
        self.on_gpu = device_of(device).runs_behind

    @classmethod
    def of(cls, config: Config, *, on_learner: bool) -> BareNetwork | None:
        """Returns the network of a config, for the learner or for inference on an actor.

        None unless it is an actor-critic of one `mlp`, `nature_cnn` or `impala_cnn` over one array,
        without recurrent core and without layer normalisation.
        """
        info = probe(config.env)
        shape = network_shape(config, info)
        device = pick_device(config.learner.device) if on_learner else torch.device("cpu")

        net: nn.Module
        match shape:
            case MlpShape(layer_norm=False):
                net = _SideBySide(_mlp(shape, shape.outputs), _mlp(shape, 1))
                return cls(net, (shape.inputs,), scale=shape.obs_scale, device=device)

            case CnnShape(channels=channels, height=height, width=width, layer_norm=False):
                net = nn.Sequential(_nature(channels, height, width), _heads(shape, FEATURES))
                image = (channels, height, width)
                return cls(net, image, scale=shape.obs_scale, device=device)

            case GeneralShape(heads=ActorCriticHeads()) if _is_impala(shape):
                [part] = shape.inputs
                net = nn.Sequential(_impala(*part.shape), _heads(shape, IMPALA_FEATURES))
                return cls(net, part.shape, scale=1 / part.span, device=device)
        return None

    def fastest(self, rows: tuple[int, ...], *, learns: bool) -> Form:
        """Returns the form that takes the least time for an observation.

        ``rows`` are the numbers of observations in one pass that are tried.
        """
        has_bf16 = self._device.type == "cuda" or processor().has_bf16
        formats = (False, True) if has_bf16 else (False,)
        layouts = (False, True) if len(self._shape) == 3 else (False,)
        forms = [
            Form(bf16, channels_last, count)
            for bf16, channels_last, count in itertools.product(formats, layouts, rows)
        ]
        best = min(forms, key=lambda form: self._seconds_per_row(form, learns))
        if not self.on_gpu:
            return best

        # Graphs come last: a capture that fails may spoil what is measured after it.
        forms = [
            best._replace(compiled=compiled, graph=graph)
            for graph, compiled in itertools.product((False, True), repeat=2)
        ]
        return min(forms, key=lambda form: self._seconds_per_row(form, learns))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Returns the parameters of the network."""
        return self._net.parameters()

    def forward(self, form: Form, obs: Tensor | None = None) -> Tensor:
        """Compute one forward pass in ``form``.

        Args:
            form: number format and memory layout.
            obs: uint8 ``[rows, *shape]``; by default random ones.

        Returns:
            Outputs ``[rows, outputs + 1]``, the value last.
        """
        if obs is None:
            obs = self._random_observations(form)

        dtype = torch.bfloat16 if form.bf16 else torch.float32
        if form.channels_last and self.on_gpu:
            rows = obs.to(dtype, memory_format=torch.channels_last)
        elif form.channels_last:
            # On a CPU one call that converts number format and layout is slower than two.
            rows = obs.to(dtype).contiguous(memory_format=torch.channels_last)
        else:
            rows = obs.to(dtype)

        with self._number_format(form):
            outputs: Tensor = self._net(rows * self._scale)
        return outputs

    def work(self, form: Form, *, learns: bool) -> Callable[[], object]:
        """Returns a call that makes one pass over ``form.rows`` made-up observations.

        If it ``learns``, the pass is forward and backward; otherwise it is inference.
        """
        obs = self._random_observations(form)
        if len(self._shape) == 3:
            order = torch.channels_last if form.channels_last else torch.contiguous_format
            self._net.to(memory_format=order)  # type: ignore[call-overload] # torch's stub lacks it

        def loss() -> Tensor:
            return self.forward(form, obs).float().square().mean()

        compute_loss: Callable[[], Tensor] = torch.compile(loss) if form.compiled else loss

        def learn() -> None:
            compute_loss().backward()
            self._net.zero_grad(set_to_none=False)

        def decide() -> None:
            with torch.inference_mode():
                self.forward(form, obs)

        if not learns:
            return decide
        call = captured(learn) if form.graph else learn
        return one_behind(call, device_of(self._device)) if self.on_gpu else call

    def _random_observations(self, form: Form) -> Tensor:
        size = (form.rows, *self._shape)
        return torch.randint(0, 100, size, dtype=torch.uint8, device=self._device)

    def _number_format(self, form: Form) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16) if form.bf16 else nullcontext()

    def _seconds_per_row(self, form: Form, learns: bool) -> float:
        """Returns the seconds that one observation takes in ``form``.

        Infinite for a form that a GPU cannot compile or capture, or lacks the memory for.
        """
        try:
            return self._time_form(form, learns)
        except Exception as error:
            optional = form.compiled or form.graph or isinstance(error, torch.OutOfMemoryError)
            if not (self.on_gpu and optional):
                raise
            return math.inf

    def _time_form(self, form: Form, learns: bool) -> float:
        """Returns the seconds per observation of the fastest of `TRIALS` passes."""
        call = self.work(form, learns=learns)
        call()
        self.settle()

        times = []
        for _ in range(TRIALS):
            began_s = time.perf_counter()
            call()
            self.settle()
            times.append(time.perf_counter() - began_s)
        return min(times) / form.rows


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Capture ``step``, whose shapes are fixed, as a CUDA graph.

    No other thread may use the GPU during the capture.

    Returns:
        A function that replays the graph.
    """
    # The capture needs calls before it on a stream that is not the default one.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> object:
        graph.replay()
        return step  # keeps the tensors of the captured graph alive

    return replay


def one_behind(call: Callable[[], object], device: Device) -> Callable[[], None]:
    """Pace a call whose work the ``device`` computes later.

    The device is then never idle between calls, and at most two are queued. Without a limit many
    would be: a CUDA graph is queued a thousand times faster than it runs.

    Returns:
        A function that makes ``call`` and waits until the device has computed the call before it.
    """
    events = [device.make_event(), device.make_event()]

    def paced() -> None:
        call()
        events.reverse()
        present, previous = events
        present.record()
        previous.synchronize()

    return paced


class _SideBySide(nn.Module):
    """Networks over the same rows, with their outputs side by side."""

    def __init__(self, *nets: nn.Module) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([net(rows) for net in self.nets], 1)


def _mlp(shape: MlpShape, outputs: int) -> nn.Sequential:
    """Returns fully connected layers, with so many linear outputs."""
    activation = nn.Tanh if shape.activation == "tanh" else nn.ReLU
    hidden = [nn.Sequential(nn.Linear(*fans), activation()) for fans in pairwise(shape.widths)]
    return nn.Sequential(*hidden, nn.Linear(shape.widths[-1], outputs))


def _nature(channels: int, height: int, width: int) -> nn.Sequential:
    """Returns the convolutional network of Mnih et al. 2015."""
    channels_in = (channels, *(conv[0] for conv in CONVS))
    convs = [
        nn.Sequential(nn.Conv2d(inputs, *conv), nn.ReLU(inplace=True))
        for inputs, conv in zip(channels_in, CONVS, strict=False)
    ]
    linear = nn.Linear(flat_features(height, width), FEATURES)
    return nn.Sequential(*convs, nn.Flatten(), linear, nn.ReLU(inplace=True))


def _impala(channels: int, height: int, width: int) -> nn.Sequential:
    """Returns the residual network of Espeholt et al. 2018, figure 3, right."""
    sections = [ConvSection(*pair) for pair in pairwise((channels, *IMPALA_CHANNELS))]
    # Each section halves the image, and rounds up.
    for _ in sections:
        height = -(-height // 2)
        width = -(-width // 2)
    linear = nn.Linear(IMPALA_CHANNELS[-1] * height * width, IMPALA_FEATURES)
    return nn.Sequential(*sections, nn.ReLU(), nn.Flatten(), linear, nn.ReLU(inplace=True))


def _heads(shape: CnnShape | GeneralShape[Any], width: int) -> nn.Linear:
    """Returns the last layer, of policy and value, over ``width`` features."""
    return nn.Linear(width, shape.outputs + 1)


def _is_impala(shape: GeneralShape[Any]) -> bool:
    """Whether the network is IMPALA's over one image, channels first, and nothing besides."""
    model = shape.model
    first = shape.inputs[0]
    is_plain = model.core == "none" and model.entry is None and not model.layer_norm
    is_image = len(shape.inputs) == 1 and first.is_image and not channels_last(first.shape)
    return model.kind == "impala_cnn" and is_plain and is_image and not shape.is_separate
