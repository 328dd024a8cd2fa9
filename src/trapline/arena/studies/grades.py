"""Letters against letters: the matrix, the reports it sums up, places, stages and averages."""

from collections.abc import Iterator, Mapping

from trapline.arena.judge.rubric import letter
from trapline.arena.standings.margin import steps
from trapline.arena.standings.places import ordinal, places, ranks
from trapline.arena.studies.records import Grade, ReportedField
from trapline.arena.studies.rows import ComparisonRow, row


def grade_rows(field: ReportedField) -> Iterator[ComparisonRow]:
    yield from _matrix_against_tasks(field)
    yield from _winners_against_grades(field)
    for line in field.grades.matrix:
        yield from _places(line.challenge, line.read(), line.source)
    for stage in field.grades.overall:
        yield from _places(f"stage {stage.stage}", stage.read(), stage.source)
    yield from _stages(field)
    yield from _matrix_places_against_stages(field)
    yield from _scores_against_letters(field)


def _matrix_against_tasks(field: ReportedField) -> Iterator[ComparisonRow]:
    """The matrix repeats what the detailed reports say."""
    matrix = field.matrix()
    origin = {line.challenge: line.source for line in field.grades.matrix}
    for task in field.grades.task:
        for model, grade in sorted(task.read().items()):
            printed = matrix[model, task.challenge].letter
            sources = [task.source, origin[task.challenge]]
            yield row("grade", f"{model}, {task.challenge}", printed, grade.letter, sources)


def _winners_against_grades(field: ReportedField) -> Iterator[ComparisonRow]:
    """Who is named the winner of a task has its best grade."""
    for task in field.grades.task:
        heights = {model: steps(grade.letter) for model, grade in task.read().items()}
        best = sorted(model for model, height in heights.items() if height == max(heights.values()))
        yield row(
            "winner",
            f"{task.challenge}, best of {len(heights)}",
            task.winner,
            " and ".join(best),
            [task.source],
            holds=task.winner in best,
            note=", ".join(f"{model} {text}" for model, text in sorted(task.grades.items())),
        )


def _places(what: str, grades: Mapping[str, Grade], source: str) -> Iterator[ComparisonRow]:
    """Equal letters share a place, and a place follows from how many are better."""
    heights = {model: float(steps(grade.letter)) for model, grade in grades.items()}
    ours, words = ranks(heights), places(heights)
    for model, grade in sorted(grades.items()):
        if grade.rank is not None:
            yield row(
                "place",
                f"{model}, {what}",
                ordinal(grade.rank),
                words[model],
                [source],
                holds=grade.rank == ours[model],
                note=f"graded {grade.letter}",
            )


def _stages(field: ReportedField) -> Iterator[ComparisonRow]:
    """A stage's grade lies next to the mean of the grades it sums up."""
    matrix = field.matrix()
    challenges = {stage.name: stage.challenges for stage in field.who.stages}
    for stage in field.grades.overall:
        for model, grade in sorted(stage.read().items()):
            letters = [matrix[model, challenge].letter for challenge in challenges[stage.stage]]
            mean = sum(map(steps, letters)) / len(letters)
            yield row(
                "stage grade",
                f"{model}, stage {stage.stage}",
                grade.letter,
                ", ".join(letters),
                [stage.source],
                holds=abs(steps(grade.letter) - mean) < 1.0,
                note="holds where the letter lies within one step of the mean",
            )


def _matrix_places_against_stages(field: ReportedField) -> Iterator[ComparisonRow]:
    """A stage of one challenge has the places of that challenge."""
    matrix = field.matrix()
    single = {s.name: s.challenges[0] for s in field.who.stages if len(s.challenges) == 1}
    for stage in field.grades.overall:
        for model, grade in sorted(stage.read().items()):
            printed = matrix.get((model, single.get(stage.stage, "")))
            if printed is not None and printed.rank is not None and grade.rank is not None:
                yield row(
                    "place",
                    f"{model}, {single[stage.stage]}, in matrix and ranking",
                    ordinal(printed.rank),
                    ordinal(grade.rank),
                    [stage.source],
                )


def _scores_against_letters(field: ReportedField) -> Iterator[ComparisonRow]:
    """The same submission graded in letters and in points; neighbouring letters agree."""
    matrix = field.matrix()
    origin = {line.challenge: line.source for line in field.grades.matrix}
    for card in field.scores.card:
        printed = matrix[card.model, card.challenge].letter
        ours = letter(card.overall)
        lowest = min(card.dimensions, key=lambda name: card.dimensions[name])
        yield row(
            "letter and points",
            f"{card.model}, {card.challenge}",
            printed,
            f"{ours} ({card.overall}/100)",
            [card.source, origin[card.challenge]],
            holds=abs(steps(printed) - steps(ours)) <= 1,
            note=f"lowest dimension: {lowest} {card.dimensions[lowest]}",
        )
