"""Engine: computes embeddings, scores and classes for programs and files."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from cfg_core.errors import EngineError, RequestError
from cfg_core.prefill_only.batch import Finished
from cfg_core.prefill_only.max_sim import max_sim
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.pipeline import Pipeline
from cfg_core.prefill_only.types import (
    FloatArray,
    Input,
    Output,
    RequestOptions,
    Role,
    SparseVector,
)

_CHUNK = 256  # inputs that are tokenized in one call


class Engine:
    """The engine for programs: its methods block until all inputs are computed.

    Only one thread at a time may use it.

        engine = Engine.load("sentence-transformers/all-MiniLM-L6-v2")
        vectors = engine.embed(["a text", "another"])          # float32 [2, 384]
    """

    def __init__(self, model: str, options: EngineOptions) -> None:
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._pipeline = Pipeline(model, options, self._finished.put)
        self.info = self._pipeline.info

    @classmethod
    def load(cls, model: str, **options: Any) -> Engine:
        """Load a model.

        model: a directory, or a name on the Hugging Face hub.

        options: fields of EngineOptions.

        Raises ConfigError for a wrong option or checkpoint, and CompatibilityError for a model that
        cannot be computed exactly.
        """
        return cls(str(model), EngineOptions.from_mapping(options))

    # -- tasks --

    def embed(
        self,
        texts: str | Sequence[Input],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        show_progress: bool | None = None,
        on_error: str = "raise",
    ) -> FloatArray:
        """float32 [n, dimensions], in the order of `texts`; [dimensions] for a single text.

        prompt_name: name of one of the checkpoint's prompts.

        prompt: text to put in front of each text, instead of a named prompt.

        dimensions, normalize: see RequestOptions.

        truncate: cut inputs that are too long. Without it they raise RequestError.

        show_progress: show a progress bar. None: for more than 1000 texts, on a terminal only.

        on_error: "raise" raises EngineError if an input fails in the model. "nan" makes its row
        NaN.
        """
        options = self.options(
            "embed",
            prompt_name=prompt_name,
            prompt=prompt,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )
        single = isinstance(texts, str)
        run = self.run_each if on_error == "nan" else self.run
        outputs = run([texts] if isinstance(texts, str) else texts, options, show_progress)
        width = dimensions or self.info.dimension or 0
        vectors = np.full((len(outputs), width), np.nan, dtype=np.float32)
        for row, output in zip(vectors, outputs, strict=True):
            if isinstance(output, Output):
                row[:] = output.array("embed")
        return vectors[0] if single else vectors

    def embed_sparse(self, texts: Sequence[Input], *, truncate: bool = False) -> list[SparseVector]:
        """Weights of vocabulary tokens for each text (SPLADE models and bge-m3)."""
        outputs = self.run(texts, self.options("sparse", truncate=truncate))
        return [output.sparse for output in outputs]

    def embed_tokens(
        self, texts: Sequence[Input], *, role: Role = "document", truncate: bool = False
    ) -> list[FloatArray]:
        """A vector for each token of each text: float32 [tokens, width] per text.

        With bge-m3's head, these are ColBERT vectors.

        role: what the texts are to a model with late interaction, which marks queries and documents
        and fills queries up.
        """
        prompt = self.info.prompts.get(role, "") if self.info.max_sim else None
        options = self.options("token_embed", prompt=prompt, role=role, truncate=truncate)
        return [output.array("token_embed") for output in self.run(texts, options)]

    def classify(
        self,
        texts: Sequence[Input],
        *,
        raw_scores: bool = False,
        truncate: bool = False,
        show_progress: bool | None = None,
    ) -> FloatArray:
        """Scores as float32 [n, labels]; the columns are `info.labels`."""
        options = self.options("classify", truncate=truncate, raw_scores=raw_scores)
        outputs = self.run(texts, options, show_progress)
        return np.stack([output.array("classify") for output in outputs])

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        truncate: bool = False,
    ) -> FloatArray:
        """float32 [n]: how well each document answers the query.

        It is the score of a cross-encoder, or of late interaction (MaxSim).

        instruction: what counts as an answer, for rerankers whose prompt has one.
        """
        if how := self.info.max_sim:
            self.info.check_instruction(instruction)
            (asked,) = self.embed_tokens([query], role="query", truncate=truncate)
            found = self.embed_tokens(documents, role="document", truncate=truncate)
            return np.array([max_sim(asked, vectors, how) for vectors in found], np.float32)
        if not self.info.takes_pairs:
            raise RequestError(
                "this model cannot score pairs: load a reranker (a classifier with one label), or"
                " compare embeddings."
            )
        self.info.check_instruction(instruction)
        options = self.options(
            "classify", prompt=instruction, raw_scores=raw_scores, truncate=truncate
        )
        outputs = self.run([(query, document) for document in documents], options)
        return np.concatenate([output.array("classify") for output in outputs])

    def options(
        self,
        *tasks: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = False,
        **fields: Any,
    ) -> RequestOptions:
        """RequestOptions with the checkpoint's prompts and limits filled in."""
        return RequestOptions(
            tasks=tasks,
            prompt=self.info.prompt_text(prompt_name, prompt),
            truncate_to=self.info.max_input_tokens if truncate else None,
            **fields,
        )

    def problems(
        self, inputs: Sequence[Input], options: RequestOptions
    ) -> list[RequestError | None]:
        """The error of each input that would be refused, else None. Tokenizes, computes nothing."""
        process = self._pipeline.input_processor.process
        try:
            process(inputs, options)
        except RequestError:
            return [_problem(process, item, options, index) for index, item in enumerate(inputs)]
        return [None] * len(inputs)

    # -- the loop --

    def run(
        self, inputs: Sequence[Input], options: RequestOptions, show_progress: bool | None = None
    ) -> list[Output]:
        """An output for each input, in order.

        Raises RequestError for a bad input, and EngineError for the first input whose batch failed
        or whose result is not finite.
        """
        outputs = []
        for output in self.run_each(inputs, options, show_progress):
            if isinstance(output, EngineError):
                raise output
            outputs.append(output)
        return outputs

    def run_each(
        self, inputs: Sequence[Input], options: RequestOptions, show_progress: bool | None = None
    ) -> list[Output | EngineError]:
        """As `run`, but returns the EngineError of an input that failed in place of its output.

        The next inputs are tokenized while batches are computed.
        """
        self._pipeline.input_processor.check_options(options)
        outputs: dict[int, Output | EngineError] = {}
        chunks = _chunks(inputs)
        with _progress(len(inputs), show_progress) as bar:
            try:
                while self._refill(chunks, options):
                    for sequence, output in self._pipeline.outputs_of(self._finished.get()):
                        outputs[sequence.index] = output
                        bar.update()
            except BaseException:
                self._abandon()
                raise
        return [outputs[index] for index in range(len(inputs))]

    def _refill(self, chunks: Iterator[tuple[int, list[Input]]], options: RequestOptions) -> bool:
        """Keep the sort window full and the executor busy; False if no batch is in flight."""
        scheduler, processor = self._pipeline.scheduler, self._pipeline.input_processor
        while scheduler.queued_sequences < self._pipeline.options.sort_window:
            self._pipeline.pump()
            chunk = next(chunks, None)
            if chunk is None:
                break
            scheduler.add(processor.process(chunk[1], options, first_index=chunk[0]))
        self._pipeline.pump()
        return self._pipeline.num_in_flight > 0

    def _abandon(self) -> None:
        """Empty the pipeline, so that the next call finds nothing of this one."""
        scheduler = self._pipeline.scheduler
        while scheduler.queued_sequences:
            scheduler.schedule()
        while self._pipeline.num_in_flight and self._pipeline.alive:
            self._pipeline.outputs_of(self._finished.get())

    def close(self) -> None:
        """End the device thread. The engine cannot be used afterwards."""
        self._pipeline.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _problem(process: Any, item: Input, options: RequestOptions, index: int) -> RequestError | None:
    try:
        process([item], options, first_index=index)
    except RequestError as error:
        return error
    return None


def _chunks(inputs: Sequence[Input]) -> Iterator[tuple[int, list[Input]]]:
    items = iter(inputs)
    start = 0
    while chunk := list(islice(items, _CHUNK)):
        yield start, chunk
        start += len(chunk)


def _progress(total: int, show: bool | None) -> Any:
    """A tqdm bar. `show` None: only for more than 1000 inputs, on a terminal."""
    from tqdm import tqdm

    hidden = {None: None if total > 1000 else True, True: False, False: True}[show]
    return tqdm(total=total, disable=hidden, unit="text", leave=False)
