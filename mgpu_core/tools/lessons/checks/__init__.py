"""One module per lesson, with one check per exercise: `exercise_1(answer)` is given the learner's function."""
