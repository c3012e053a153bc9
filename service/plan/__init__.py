"""The planner: what a setting of a job will cost in staleness and in waiting, before or while it runs. Pure, but for command and plot.

`setting` what is planned · `options` what people say of it · `lengths` how long rollouts are · `forms` closed forms · `simulator` the same
as events, with what the forms leave out · `results` what it found · `gates` what other systems make of a budget · `advice` bottleneck,
sizes, knobs · `presets` published runs · `live` a running job's figures · `report`, `plot`, `command` for people.
"""
