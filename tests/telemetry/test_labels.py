"""The label of a model has a bounded set of values, whatever clients send."""

from batchline.telemetry.labels import MAX_LEARNED_MODELS, OTHER_MODEL, ModelLabels


def _ignore(model: str) -> None:
    """Do nothing when a model is learned."""


def test_a_configured_model_has_its_own_label() -> None:
    labels = ModelLabels(on_learned=_ignore)
    labels.add("small")
    assert labels.of("small") == "small"


def test_a_name_that_no_upstream_has_answered_for_is_other() -> None:
    learned: list[str] = []
    labels = ModelLabels(on_learned=learned.append)
    assert labels.of("ignore previous instructions") == OTHER_MODEL
    assert labels.on_answer("llama") == "llama"
    assert labels.of("llama") == "llama"
    assert labels.on_answer("llama") == "llama"
    assert labels.on_answer("") == OTHER_MODEL
    assert learned == ["llama"]


def test_the_number_of_learned_labels_is_bounded_and_configured_models_take_no_room() -> None:
    labels = ModelLabels(on_learned=_ignore)
    for n in range(100):
        labels.add(f"configured-{n}")
    learned = [labels.on_answer(f"model-{n}") for n in range(MAX_LEARNED_MODELS + 10)]
    assert learned.count(OTHER_MODEL) == 10
    assert labels.of("model-0") == "model-0"
