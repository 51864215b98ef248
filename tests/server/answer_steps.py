"""Strategies for the steps of an answer: reasoning, text and tool calls in any order and any pieces."""

from __future__ import annotations

from hypothesis import strategies as st

from s2moe.engine.messages import Step, ToolCallDelta

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)


@st.composite
def answer_steps(draw: st.DrawFn) -> list[Step]:
    """As an engine sends them: the pieces of a call come together, and only the first has id and name."""
    steps: list[Step] = []
    n_calls = 0
    goes_on = False
    for _ in range(draw(st.integers(0, 6))):
        reasoning, content = draw(TEXTS), draw(TEXTS)
        goes_on = goes_on and not reasoning and not content
        deltas: list[ToolCallDelta] = []
        for piece in draw(st.lists(TEXTS, max_size=3)):
            if goes_on and draw(st.booleans()):
                deltas.append(ToolCallDelta(index=n_calls - 1, arguments=piece))
                continue
            call_id, name = f"call_{n_calls}", draw(st.sampled_from(("look", "buy")))
            deltas.append(ToolCallDelta(index=n_calls, id=call_id, name=name, arguments=piece))
            n_calls += 1
            goes_on = True
        steps.append(Step(request_id="r", reasoning=reasoning, content=content, tool_calls=deltas))
    return steps


def calls_of(steps: list[Step]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call."""
    calls: list[tuple[str, str, str]] = []
    for delta in (each for step in steps for each in step.tool_calls):
        if delta.id:
            calls.append((delta.id, delta.name, delta.arguments))
        else:
            call_id, name, arguments = calls[-1]
            calls[-1] = (call_id, name, arguments + delta.arguments)
    return calls
