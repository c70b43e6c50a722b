"""``python -m meshinfer doctor``: whether a job would work here, and what a support engineer would ask first.

Run it as the job is run (``torchrun ... -m meshinfer doctor``, ``srun python -m meshinfer doctor``): each rank looks at
its own process and host, and rank 0 serves a policy to all the others as the job's server would. To add a check, write
a function from :class:`~meshinfer.doctor.context.Context` to a :class:`~meshinfer.doctor.findings.Finding` (or a list
of them) and name it in :data:`meshinfer.doctor.checks.CHECKS`.
"""
