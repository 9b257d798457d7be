"""The page that shows a job, live, recorded or simulated: its server. Run: everstep dashboard [RUN]

`source` folds the journal into views, `stream` sends what changed of them, `guard` and `gate` decide who may ask,
`control` carries wishes to the job's controller, `app` ties paths to them, `serve` is the process.
"""
