"""Record: folds over the journal into what people read (summaries, status, pictures)."""
