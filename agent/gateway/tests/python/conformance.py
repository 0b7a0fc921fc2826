"""The official `openai` client against a server.

    pip install -r requirements.txt
    python conformance.py --base-url http://127.0.0.1:8000/v1 --model NAME [--api-key KEY] [--scripted]

Without --scripted it checks what holds for any model: shapes, streams, limits, usage, errors, cancellation. With it the
server must be the scripted one of tests/api_python.rs, which knows the words "weather", "fail" and "endless".
Prints one line per check; exits 1 at the first that fails.
"""

import argparse
import concurrent.futures
import math
import sys

import openai

CHECKS = []


def check(scripted=False):
    def add(function):
        CHECKS.append((function, scripted))
        return function

    return add


def ask(client, model, text="Say hello.", **more):
    messages = [{"role": "user", "content": text}]
    more.setdefault("max_tokens", 16)
    return client.chat.completions.create(model=model, messages=messages, **more)


def gather(stream):
    """Text, finish reasons, usages and calls of a stream."""
    text, finishes, usages, calls = "", [], [], {}
    for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                finishes.append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    return text, finishes, usages, calls


@check()
def models_are_listed(client, model):
    names = [entry.id for entry in client.models.list()]
    assert model in names, names
    assert client.models.retrieve(model).object == "model"
    try:
        client.models.retrieve("no-such-model")
        raise AssertionError("an unknown model was found")
    except openai.NotFoundError:
        pass


@check()
def a_whole_answer_has_text_finish_reason_and_usage(client, model):
    answer = ask(client, model, temperature=0)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == model
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 16
    assert usage.prompt_tokens_details.cached_tokens >= 0


@check()
def a_stream_says_what_the_whole_answer_says(client, model):
    whole = ask(client, model, temperature=0)
    stream = ask(client, model, temperature=0, stream=True, stream_options={"include_usage": True})
    text, finishes, usages, _ = gather(stream)
    assert text == whole.choices[0].message.content
    assert finishes == [whole.choices[0].finish_reason]
    assert len(usages) == 1 and usages[0].completion_tokens == whole.usage.completion_tokens
    _, _, usages, _ = gather(ask(client, model, stream=True))
    assert usages == []


@check()
def the_token_limit_is_kept(client, model):
    answer = ask(client, model, max_tokens=openai.NOT_GIVEN, max_completion_tokens=3)
    assert answer.usage.completion_tokens <= 3


@check()
def logprobs_are_finite_and_add_up_to_the_text(client, model):
    answer = ask(client, model, temperature=0, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
    assert joined.lstrip("\n") == answer.choices[0].message.content
    for entry in entries:
        assert math.isfinite(entry.logprob) and len(entry.top_logprobs) <= 3


@check()
def a_seed_repeats_the_answer(client, model):
    answers = {ask(client, model, temperature=1.0, seed=42).choices[0].message.content for _ in range(2)}
    assert len(answers) == 1, answers


@check()
def completions_take_text_and_ids(client, model):
    answer = client.completions.create(model=model, prompt="Hello", max_tokens=4, temperature=0)
    assert answer.object == "text_completion" and isinstance(answer.choices[0].text, str)
    answer = client.completions.create(
        model=model, prompt=[5, 6, 7], max_tokens=4, extra_body={"return_token_ids": True}
    )
    assert answer.usage.prompt_tokens == 3
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens
    pieces = client.completions.create(model=model, prompt="Hello", max_tokens=4, stream=True)
    assert [p.choices[0].finish_reason for p in pieces][-1] in ("stop", "length")


@check()
def nulls_are_the_same_as_nothing(client, model):
    ask(client, model, temperature=None, top_p=None, stop=None, seed=None, n=None, tools=None, user=None)


@check()
def bad_requests_name_their_field(client, model):
    for field, more in [
        ("temperature", {"temperature": 9}),
        ("n", {"n": 2}),
        ("top_k", {"extra_body": {"top_k": 40}}),
        ("presence_penalty", {"presence_penalty": 1.5}),
        ("max_tokens", {"max_tokens": 0}),
        ("response_format", {"response_format": {"type": "json_object"}}),
    ]:
        try:
            ask(client, model, **more)
            raise AssertionError(f"{field} was accepted")
        except openai.BadRequestError as error:
            assert error.param == field and error.type == "invalid_request_error", (field, error.body)
    try:
        ask(client, "no-such-model")
        raise AssertionError("an unknown model answered")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    try:
        ask(client, model, text="word " * 2_000_000)
        raise AssertionError("a prompt that is too long was accepted")
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"


@check()
def unknown_fields_are_named_in_a_header(client, model):
    reply = client.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=1, extra_body={"zoom": 3}
    )
    assert reply.headers["x-deepinfer-ignored"] == "zoom"
    assert reply.headers["x-request-id"]


@check()
def a_stream_that_is_closed_early_leaves_the_client_usable(client, model):
    for _ in range(5):
        stream = ask(client, model, stream=True, max_tokens=64)
        next(iter(stream))
        stream.close()
    a_whole_answer_has_text_finish_reason_and_usage(client, model)


@check()
def twenty_requests_at_once_are_answered(client, model):
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ask(client, model, temperature=0).choices[0].message.content, range(20)))
    assert len(set(answers)) == 1, set(answers)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@check()
def tools_are_accepted_and_calls_can_be_sent_back(client, model):
    answer = ask(client, model, text="Hello", tools=TOOLS, tool_choice="auto")
    message = answer.choices[0].message
    # A call that the token limit cut is sent as far as it came, and the reason says so.
    reasons = ("tool_calls", "length") if message.tool_calls else ("stop", "length")
    assert answer.choices[0].finish_reason in reasons, (answer.choices[0].finish_reason, message.tool_calls)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "How is it in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


@check()
def reasoning_has_its_own_field(client, model):
    answer = ask(client, model, reasoning_effort="high", max_tokens=24)
    assert isinstance(answer.choices[0].message.reasoning_content, str)
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens <= answer.usage.completion_tokens


@check(scripted=True)
def a_call_streams_and_goes_back_as_received(client, model):
    text = "What is the weather?"
    _, finishes, _, calls = gather(ask(client, model, text=text, tools=TOOLS, stream=True))
    assert finishes == ["tool_calls"] and calls == {0: ("weather", '{"city": "Rome"}')}, (finishes, calls)
    answer = ask(client, model, text=text, tools=TOOLS)
    message = answer.choices[0].message
    messages = [
        {"role": "user", "content": text},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
    ]
    client.chat.completions.create(model=model, messages=messages, tools=TOOLS)


@check(scripted=True)
def a_failure_in_a_stream_is_an_api_error(client, model):
    stream = ask(client, model, text="Please fail.", stream=True)
    text = ""
    try:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        raise AssertionError("the stream ended as if nothing had happened")
    except openai.APIError as error:
        assert "engine" in str(error), error
    assert text, "what came before the failure was delivered"


@check(scripted=True)
def an_endless_stream_can_be_left(client, model):
    stream = ask(client, model, text="An endless one.", stream=True)
    for _, _ in zip(range(20), stream):
        pass
    stream.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--scripted", action="store_true")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=arguments.base_url, api_key=arguments.api_key, max_retries=0, timeout=120)
    for function, scripted in CHECKS:
        if scripted and not arguments.scripted:
            continue
        try:
            function(client, arguments.model)
        except Exception as error:
            print(f"FAILED {function.__name__}: {type(error).__name__}: {error}")
            sys.exit(1)
        print(f"ok {function.__name__}", flush=True)
    print("all passed")


if __name__ == "__main__":
    main()
