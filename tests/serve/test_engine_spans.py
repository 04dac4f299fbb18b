"""The spans of an engine: one for each request with the parts of its life inside, one for each step."""

import pytest
from tests.serve.models import tiny_model
from tests.serve.test_engine import prompt_of

from kvist.serve import Engine, SamplingParams, cache_config
from kvist.serve import engine as module
from kvist.wire.engine_spans import EngineSpans
from kvist.wire.tracing import NO_TRACING, OpenTelemetryTracing


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def traced_engine(model, observer, **settings):
    config = cache_config(model, num_blocks=64, block_size=4, max_sequences=8)
    return Engine(model, config, **{"max_step_tokens": 64, "observer": observer} | settings)


@pytest.fixture
def recorded():
    """A tracer, and the spans that it has recorded."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    yield provider.get_tracer("kvist"), exporter.get_finished_spans
    provider.shutdown()


def named(spans, name):
    return [span for span in spans if span.name == name]


def numbers(span):
    return {name.removeprefix("kvist."): value for name, value in span.attributes.items()}


def test_a_request_has_a_span_with_its_queueing_prefill_and_decode(model, recorded):
    tracer, finished = recorded
    engine = traced_engine(model, EngineSpans(OpenTelemetryTracing(tracer)))
    prompt = prompt_of(9)
    with tracer.start_as_current_span("a call"):
        engine.generate([prompt], SamplingParams(max_new_tokens=3, stop_token_ids=()))
    engine.generate([prompt], SamplingParams(max_new_tokens=2, stop_token_ids=()))
    requests = named(finished(), "kvist.request")
    told = {"num_prompt_tokens": 9, "num_preemptions": 0, "finish_reason": "length"}
    assert [numbers(request) for request in requests] == [
        told | {"num_cached_tokens": 0, "num_generated_tokens": 3},
        told | {"num_cached_tokens": 8, "num_generated_tokens": 2},
    ]
    (call,) = named(finished(), "a call")
    assert requests[0].parent.span_id == call.context.span_id
    assert requests[1].parent is None
    for request in requests:
        inside = [span for span in finished() if span.parent and span.parent.span_id == request.context.span_id]
        assert [span.name for span in inside] == ["kvist.queue", "kvist.prefill", "kvist.decode"]
        ends = [request.start_time, *(time for span in inside for time in (span.start_time, span.end_time))]
        assert ends == sorted(ends)
        assert inside[-1].end_time <= request.end_time


def test_a_step_says_how_much_it_computes(model, recorded):
    tracer, finished = recorded
    engine = traced_engine(model, EngineSpans(OpenTelemetryTracing(tracer)), max_step_tokens=8)
    engine.generate([prompt_of(11)], SamplingParams(max_new_tokens=3, stop_token_ids=()))
    steps = [numbers(span) for span in named(finished(), "kvist.step")]
    assert [step["num_tokens"] for step in steps] == [8, 3, 1, 1]
    assert [step["num_prefills"] for step in steps] == [1, 1, 0, 0]
    assert {step["num_requests"] for step in steps} == {1}


def test_a_request_that_is_aborted_ends_where_it_is(model, recorded):
    tracer, finished = recorded
    engine = traced_engine(model, EngineSpans(OpenTelemetryTracing(tracer)))
    waiting = engine.submit(prompt_of(5))
    engine.abort(waiting)
    engine.abort(waiting)
    (request,) = named(finished(), "kvist.request")
    assert numbers(request)["finish_reason"] == "aborted"
    assert [span.name for span in finished()] == ["kvist.queue", "kvist.request"]


def test_a_step_that_fails_and_is_taken_again_is_two(model, recorded, monkeypatch):
    tracer, finished = recorded
    engine = traced_engine(model, EngineSpans(OpenTelemetryTracing(tracer)))
    generation = engine.submit(prompt_of(5), SamplingParams(max_new_tokens=1, stop_token_ids=()))

    def failing(logits, samplers):
        raise RuntimeError("no tokens")

    with monkeypatch.context() as changed, pytest.raises(RuntimeError, match="no tokens"):
        changed.setattr(module, "choose_tokens", failing)
        engine.step()
    engine.step()
    assert generation.is_finished
    failed, step = named(finished(), "kvist.step")
    assert (failed.status.is_ok, step.status.is_ok) == (False, True)
    assert len(named(finished(), "kvist.prefill")) == 1


def test_without_opentelemetry_nothing_is_recorded_and_everything_runs(model):
    spans = EngineSpans(NO_TRACING)
    prompt, sampling = prompt_of(9), SamplingParams(max_new_tokens=3, stop_token_ids=())
    (traced,) = traced_engine(model, spans).generate([prompt], sampling)
    config = cache_config(model, num_blocks=64, block_size=4, max_sequences=8)
    (plain,) = Engine(model, config, max_step_tokens=64).generate([prompt], sampling)
    assert traced.token_ids == plain.token_ids
    assert spans._requests == {}
