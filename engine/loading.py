"""From a model file to weights, a context and an expert cache that together keep a memory budget."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from s2moe.engine.contexts import DEFAULT_N_BATCH, ContextMaker, Contexts, expert_width
from s2moe.engine.device import ON_CPU, Device
from s2moe.engine.embedding import may_name_pooling
from s2moe.engine.errors import EngineStartError
from s2moe.engine.gpu_plan import WITHOUT_SLOTS, DenseNeeds, GpuPlan, activation_bytes
from s2moe.engine.gpu_slots import (
    NO_DRAFT_CONTEXT,
    allocate_slots,
    may_lie_whole,
    plan_gpu,
    refuse_cache_options,
    wants_slots,
)
from s2moe.engine.memory import (
    Budget,
    Footprint,
    machine_budget,
    measure_footprint,
    memory_supply,
)
from s2moe.engine.messages import Configure, Plan
from s2moe.engine.model_file import about, drop_page_cache, open_failure
from s2moe.engine.native import Library, NativeError
from s2moe.engine.native_experts import ContextMemory, Experts, Io, Policy, Reader, model_layout
from s2moe.engine.native_log import NativeLog
from s2moe.engine.plan import (
    MIN_BATCH_TOKENS,
    START_VARIATION_BYTES,
    BudgetTooLargeError,
    BudgetTooSmallError,
    MemoryPlan,
    ModelLayout,
    Needs,
)
from s2moe.engine.speculation import SpeculationSupport

logger = logging.getLogger(__name__)

ALL_LAYERS = 999
MAX_BATCH_TOKENS = 1 << 20
"""More than any micro-batch has."""
_NO_DEVICES = (ctypes.c_void_p * 1)(None)
"""A list of llama.cpp's devices: ends before the first."""
_libc = ctypes.CDLL(None)

Progress = Callable[[str, float], None]
"""Takes the phase and its fraction, 0 … 1."""
OnPlan = Callable[[Plan], None]
"""Takes the plan before anything is loaded."""


@dataclass
class LoadedModel:
    """Handles of llama.h and the cache; `close()` frees them in their order."""

    llama_cpp: Any
    handle: Any
    contexts: Contexts
    speculation: SpeculationSupport
    experts: Experts | None = None
    """None: a dense model, or one that lies on a GPU as a whole."""
    plan: MemoryPlan | None = None
    """None for a model that lies on a GPU as a whole."""
    gives_embeddings: bool = False
    """Instead of text."""
    gpu_plan: GpuPlan | None = None
    """None: there are no slots for experts on a GPU."""

    def close(self) -> None:
        self.contexts.free()
        self.llama_cpp.llama_model_free(self.handle)
        if self.experts is not None:
            self.experts.close()


class Loader:
    """Loads one model. Used once, by one thread."""

    def __init__(
        self,
        llama_cpp: Any,
        library: Library,
        log: NativeLog,
        configure: Configure,
        n_threads: int,
        measure: Callable[[], Footprint],
        device: Device = ON_CPU,
    ) -> None:
        """`measure` says what both processes take."""
        self._llama_cpp = llama_cpp
        self._library = library
        self._log = log
        self._configure = configure
        self._contexts = ContextMaker(llama_cpp, library, log, configure, n_threads)
        self._measure = measure
        self._device = device
        self._path = configure.model_path
        self._gpu_plan: GpuPlan | None = None
        """None: there are no slots for experts on a GPU."""
        self._whole_remedy = WITHOUT_SLOTS
        """Where a GPU has no room for the model as a whole."""
        self._gpu_batch = MAX_BATCH_TOKENS
        """The largest micro-batch whose buffers leave room for slots on a GPU."""

    def load(self, on_progress: Progress, on_plan: OnPlan | None = None) -> LoadedModel:
        """Raises EngineStartError; nothing stays allocated then."""
        if self._device.gpus:
            on_progress("plan", 0.0)
            self._gpu_plan = self._plan_gpu()
            if self._gpu_plan is None:
                with self._remedy_for_memory():
                    return self._load_whole(on_progress)
        return self._load_planned(on_progress, on_plan)

    def _load_whole(self, on_progress: Progress) -> LoadedModel:
        """Onto the GPUs."""
        on_progress("model", 0.0)
        handle = self._load_model(self._model_params(None), on_progress)
        try:
            contexts = self._contexts.create(handle, min(self._contexts.n_batch, self._gpu_batch))
            return LoadedModel(
                *(self._llama_cpp, handle, contexts, self._contexts.speculation(handle)),
                gives_embeddings=self._contexts.gives_embeddings(handle),
            )
        except EngineStartError:
            self._llama_cpp.llama_model_free(handle)
            raise

    @contextlib.contextmanager
    def _remedy_for_memory(self) -> Iterator[None]:
        """Names what helps where memory runs out although the plan had enough."""
        try:
            yield
        except EngineStartError as error:
            if not self._log.ran_out_of_memory:
                raise
            raise EngineStartError(
                "insufficient_memory",
                f"memory ran out while all of {self._path} was loaded onto the GPU: {self._log.explain('')}; "
                f"{self._whole_remedy}",
            ) from error

    def plan(self, experts: Experts | None) -> MemoryPlan:
        """What loading would take, without loading anything. Raises EngineStartError, but not for a budget
        that is too small or too large: MemoryPlan.check() and check_supply() do."""
        with self._simulated_model(experts) as handle:
            if self._contexts.gives_embeddings(handle) != self._gives_embeddings:
                raise EngineStartError(
                    "model_invalid",
                    f"{self._path} names its pooling too late in its metadata; convert it anew",
                )
            n_ctx = self._contexts.n_ctx(handle)
            n_batch = min(self._contexts.n_batch, n_ctx, self._gpu_batch)
            memory = self._simulated_memory(handle, n_batch)
            footprint = self._measure()
            batches = {}
            if self._configure.n_batch == 0:
                batches = {n_batch: memory.compute_bytes}
                while (smaller := min(batches)) > MIN_BATCH_TOKENS:
                    batches[smaller // 2] = self._simulated_memory(handle, smaller // 2).compute_bytes
            return MemoryPlan(
                layout=self._layout,
                budget=self._budget(),
                needs=Needs(
                    front_end_bytes=footprint.front_end_bytes,
                    engine_bytes=footprint.engine_bytes,
                    weights_bytes=memory.weights_bytes,
                    kv_bytes=memory.kv_bytes,
                    compute_bytes=memory.compute_bytes,
                    n_ctx=n_ctx,
                    n_batch=n_batch,
                    gpu_kv_bytes=memory.gpu_kv_bytes,
                    n_kv_caches=self._contexts.n_kv_caches(handle),
                ),
                slots_floor_bytes=0 if experts is None else self._slots_floor_bytes(experts),
                feed_bytes=experts.floor_bytes if experts is not None and self._shares_memory else 0,
                batches=batches,
                supply=memory_supply(measure_footprint(self._configure.front_end_bytes).total_bytes),
                prompt_cache_size=0 if self._gives_embeddings else self._configure.prompt_cache_bytes,
            ).with_best_batch()

    def open_experts(self) -> Experts | None:
        """None for a dense model. Raises EngineStartError."""
        if not self._layout.n_expert:
            return None
        configure = self._configure
        try:
            return Experts(
                self._library,
                self._path,
                io=cast(Io, configure.io),
                reader=cast(Reader, configure.reader),
                policy=cast(Policy, configure.expert_policy),
            )
        except NativeError as error:
            raise EngineStartError(*open_failure(error, configure)) from error

    def _load_planned(self, on_progress: Progress, on_plan: OnPlan | None) -> LoadedModel:
        on_progress("plan", 0.0)
        experts = self.open_experts()
        try:
            plan = self.plan(experts)
            self._check(plan)
            if self._gpu_plan is not None and self._shares_memory:
                self._gpu_plan = self._gpu_plan.limited_to(plan.capacity_bytes)
            if plan.needs.n_batch < min(DEFAULT_N_BATCH, plan.needs.n_ctx) and not self._configure.n_batch:
                logger.warning(
                    "prompts are evaluated %d tokens at a time, to leave memory to the experts; "
                    "set --batch-size to choose yourself",
                    plan.needs.n_batch,
                )
            on_progress("plan", 1.0)
            if on_plan is not None:
                gpu_line = "" if self._gpu_plan is None else self._gpu_plan.line()
                on_plan(plan.to_wire({} if experts is None else experts.reader(), gpu_line))
            return self._load_into(plan, experts, on_progress)
        except BaseException:
            if experts is not None:
                experts.close()
            raise

    def _load_into(self, plan: MemoryPlan, experts: Experts | None, on_progress: Progress) -> LoadedModel:
        handle = self._load_model(self._model_params(experts), on_progress)
        try:
            on_progress("context", 0.0)
            contexts = self._contexts.create(handle, plan.needs.n_batch)
            loaded = LoadedModel(
                *(self._llama_cpp, handle, contexts, self._contexts.speculation(handle), experts, plan),
                gives_embeddings=self._gives_embeddings,
                gpu_plan=self._gpu_plan,
            )
        except EngineStartError:
            self._llama_cpp.llama_model_free(handle)
            raise
        try:
            if experts is not None:
                loaded.plan = plan = self._measured(plan, loaded)
                drop_page_cache(plan.layout.files)
                self._check(plan, START_VARIATION_BYTES)
                self._allocate(plan, experts, contexts)
            on_progress("context", 1.0)
        except BaseException as error:
            loaded.experts = None  # closed by the caller
            loaded.close()
            if isinstance(error, NativeError):
                raise EngineStartError(
                    "insufficient_memory",
                    f"no memory for {plan.n_slots} experts: {error.message}; give a smaller --memory-budget",
                ) from error
            raise
        return loaded

    def _allocate(self, plan: MemoryPlan, experts: Experts, contexts: Contexts) -> None:
        """The cache's slots, and those of the GPU if there are any."""
        if self._gpu_plan is None:
            experts.allocate(max(plan.capacity_bytes, experts.floor_bytes))
        else:
            allocate_slots(self._gpu_plan, self._device, experts, contexts.main, plan.capacity_bytes)

    def _plan_gpu(self) -> GpuPlan | None:
        """None: the model is to lie on the GPU as a whole."""
        if not self._layout.n_expert:
            refuse_cache_options(self._configure)
            return None
        experts = self.open_experts()
        assert experts is not None
        try:
            with self._simulated_model(experts) as handle:
                n_batch = min(self._contexts.n_batch, self._contexts.n_ctx(handle))
                has_draft_context = self._contexts.n_kv_caches(handle) > 1
                while True:
                    plan = plan_gpu(
                        *(self._library, self._device, self._configure, self._layout, self._budget()),
                        dense=self._dense_needs(handle, n_batch),
                        output_bytes=self._output_bytes(handle),
                        floor_bytes=experts.device_floor_bytes,
                    )
                    if plan.fits or may_lie_whole(self._configure, plan):
                        break
                    if self._configure.n_batch or n_batch <= MIN_BATCH_TOKENS:
                        break
                    n_batch = max(MIN_BATCH_TOKENS, n_batch // 2)
        finally:
            experts.close()
        self._gpu_batch = n_batch
        if not wants_slots(self._configure, plan):
            self._whole_remedy = plan.remedy
            return None
        if has_draft_context:
            raise EngineStartError(*NO_DRAFT_CONTEXT)
        return plan

    def _dense_needs(self, handle: Any, n_batch: int) -> DenseNeeds:
        """Of a GPU, with what the simulated contexts lack, which compute experts on the CPU."""
        memory = self._simulated_memory(handle, n_batch)
        width, n_embd = expert_width(self._llama_cpp, handle), self._llama_cpp.llama_model_n_embd(handle)
        between_bytes = activation_bytes(n_batch, self._layout.n_expert_used, width, n_embd)
        return DenseNeeds(
            memory.gpu_weights_bytes, memory.gpu_kv_bytes, memory.gpu_compute_bytes + between_bytes
        )

    def _output_bytes(self, handle: Any) -> int:
        """Of the matrix that gives the logits, in the largest type that is usual."""
        llama_cpp = self._llama_cpp
        n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(handle))
        n_embd: int = llama_cpp.llama_model_n_embd(handle)
        return 2 * n_vocab * n_embd

    @property
    def _shares_memory(self) -> bool:
        """Whether slots of a GPU are in the machine's memory."""
        return self._gpu_plan is not None and self._device.is_unified

    def _slots_floor_bytes(self, experts: Experts) -> int:
        return experts.device_floor_bytes if self._shares_memory else experts.floor_bytes

    def _measured(self, plan: MemoryPlan, loaded: LoadedModel) -> MemoryPlan:
        """The plan with what both processes really take now. Weights and KV cache have been written already,
        the compute buffers have not."""
        memory = self._contexts.memory(loaded.handle, loaded.contexts)
        _libc.malloc_trim(0)
        footprint = self._measure()
        engine_bytes = footprint.engine_bytes - memory.weights_bytes - memory.kv_bytes
        if self._shares_memory:
            memory.share()
        return plan.with_needs(
            front_end_bytes=footprint.front_end_bytes,
            engine_bytes=max(plan.needs.engine_bytes, engine_bytes),
            weights_bytes=memory.weights_bytes,
            kv_bytes=memory.kv_bytes,
            compute_bytes=memory.compute_bytes,
        )

    def _check(self, plan: MemoryPlan, tolerance_bytes: int = 0) -> None:
        try:
            plan.check_supply()
            if plan.must_fit:
                plan.check(tolerance_bytes)
        except BudgetTooLargeError as error:
            raise EngineStartError("budget_too_large", str(error)) from None
        except BudgetTooSmallError as error:
            # else memory is short now
            code = "budget_too_small" if plan.budget.explicit else "insufficient_memory"
            raise EngineStartError(code, str(error)) from None

    def _budget(self) -> Budget:
        chosen = self._configure.memory_budget_bytes
        if chosen:
            return Budget(chosen, "--memory-budget", explicit=True)
        return machine_budget(measure_footprint(self._configure.front_end_bytes).total_bytes)

    # llama.cpp

    @cached_property
    def _file_layout(self) -> ModelLayout:
        try:
            return ModelLayout.from_json(model_layout(self._library, self._path))
        except NativeError as error:
            raise EngineStartError(
                "model_invalid",
                f"cannot load {about(self._path, error)}",
            ) from error

    @cached_property
    def _layout(self) -> ModelLayout:
        layout = self._file_layout
        # a text uses nearly all experts of a layer at once: a cache would be of no use
        return layout.without_experts() if self._gives_embeddings else layout

    @cached_property
    def _gives_embeddings(self) -> bool:
        if not may_name_pooling(self._path):
            return False
        with self._simulated_model(None) as handle:
            return self._contexts.gives_embeddings(handle)

    def _model_params(self, experts: Experts | None) -> Any:
        params = self._llama_cpp.llama_model_default_params()
        if self._device.gpus:
            params.n_gpu_layers = ALL_LAYERS
            if experts is not None:
                params.split_mode, params.main_gpu = self._llama_cpp.LLAMA_SPLIT_MODE_NONE, 0
        else:
            params.n_gpu_layers = 0
            # else llama.cpp asks each GPU for its memory, which takes some, and computes large batches there
            params.devices = ctypes.addressof(_NO_DEVICES)
        if experts is not None:
            params.tensor_buft_overrides = experts.overrides
        if experts is not None or self._configure.memory_budget_bytes:
            # weights are read once into memory of ours instead of staying in a page cache that gives way;
            # with buffered reads the kernel would read ahead into the experts
            params.load_mode = (
                self._llama_cpp.LLAMA_LOAD_MODE_NONE
                if self._configure.io == "buffered"
                else self._llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO
            )
            params.check_tensors = True  # a router of NaNs would choose experts that do not exist
        return params

    def _load_model(self, params: Any, on_progress: Progress | None) -> Any:
        def report(fraction: float, _user_data: Any) -> bool:
            if on_progress is not None:
                on_progress("model", fraction)
            return True

        callback = self._llama_cpp.llama_progress_callback(report)
        params.progress_callback = callback
        handle = self._llama_cpp.llama_model_load_from_file(self._path.encode(), params)
        if not handle:
            reason = self._log.explain("llama.cpp gave no reason")
            raise EngineStartError(
                "model_invalid",
                f"cannot load {self._path}: {reason}; the file may be damaged, of an unknown "
                "architecture, or larger than the memory",
            )
        return handle

    @contextlib.contextmanager
    def _simulated_model(self, experts: Experts | None) -> Iterator[Any]:
        """The model without any weights."""
        params = self._model_params(experts)
        params.no_alloc = True
        params.load_mode = self._llama_cpp.LLAMA_LOAD_MODE_NONE
        handle = self._load_model(params, None)
        try:
            yield handle
        finally:
            self._llama_cpp.llama_model_free(handle)

    def _simulated_memory(self, handle: Any, n_batch: int) -> ContextMemory:
        contexts = self._contexts.create(handle, n_batch)
        try:
            memory = self._contexts.memory(handle, contexts)
            if self._shares_memory:
                memory.share()
            return memory
        finally:
            contexts.free()
