"""TRIPOD+AI checklist for an experiment, with the answers that the software can give.

Source: Collins et al., BMJ 385 (2024): e078378. Topics are in our own words.
"""

from collections.abc import Mapping
from typing import NamedTuple

OPEN = "to be filled by the authors"


class Item(NamedTuple):
    """Item of the checklist."""

    number: str
    topic: str
    answer: str


_TOPICS = {
    "1": "Title: a study that develops or evaluates a prediction model, population, outcome",
    "2": "Abstract by TRIPOD+AI for Abstracts",
    "3a": "Background: health care context and rationale",
    "3b": "Background: target population, purpose in the care pathway, intended users",
    "3c": "Background: known health inequalities",
    "4": "Objectives: development, validation or both",
    "5a": "Data: sources, rationale, representativeness",
    "5b": "Data: dates of accrual and follow-up",
    "6a": "Participants: setting, number and location of centres",
    "6b": "Participants: eligibility criteria",
    "6c": "Participants: treatments received",
    "7": "Data preparation and quality checks",
    "8a": "Outcome: definition, time horizon, how it was assessed",
    "8b": "Outcome: qualifications of those who assessed it",
    "8c": "Outcome: blinding of its assessment",
    "9a": "Predictors: initial choice",
    "9b": "Predictors: definition and measurement",
    "9c": "Predictors: qualifications of those who assessed them",
    "10": "Sample size and its justification",
    "11": "Missing data",
    "12a": "Analysis: how data were used, partitioning",
    "12b": "Analysis: how predictors were handled",
    "12c": "Analysis: type of model, building steps, hyperparameters, internal validation",
    "12d": "Analysis: heterogeneity between clusters (sites)",
    "12e": "Analysis: measures of performance and their plots",
    "12f": "Analysis: updating of the model",
    "12g": "Analysis: how predictions are computed",
    "13": "Class imbalance: methods and recalibration",
    "14": "Fairness: approaches and rationale",
    "15": "Model output: probabilities or classes, and thresholds",
    "16": "Differences between training and evaluation data",
    "17": "Ethical approval",
    "18a": "Open science: funding",
    "18b": "Open science: conflicts of interest",
    "18c": "Open science: protocol",
    "18d": "Open science: registration",
    "18e": "Open science: data sharing",
    "18f": "Open science: code sharing",
    "19": "Patient and public involvement",
    "20a": "Results: flow of participants, follow-up",
    "20b": "Results: characteristics, by centre where there are several",
    "20c": "Results: comparison with the development data",
    "21": "Results: participants and events in each analysis",
    "22": "Results: the full model, for predictions of new individuals",
    "23a": "Results: performance with confidence intervals, also in subgroups",
    "23b": "Results: heterogeneity of performance between clusters",
    "24": "Results: updating of the model",
    "25": "Discussion: interpretation, with fairness",
    "26": "Discussion: limitations",
    "27a": "Discussion: handling of poor or missing input in use",
    "27b": "Discussion: expertise that users need",
    "27c": "Discussion: next steps",
}


def checklist(answers: Mapping[str, str]) -> list[Item]:
    """All items; items without an answer are left to the authors."""
    unknown = answers.keys() - _TOPICS.keys()
    if unknown:
        raise KeyError(f"items must be of TRIPOD+AI, got {sorted(unknown)}")
    return [
        Item(number, topic, answers.get(number) or OPEN)
        for number, topic in _TOPICS.items()
    ]
