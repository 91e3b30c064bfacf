"""How the parameters of any JAX program are split over a mesh, derived by reading the program."""

from redco_cli.sharding.derive import derive, make_plan
from redco_cli.sharding.plan import Collective, Plan, Row
from redco_cli.sharding.program.reading import Reading, read
from redco_cli.sharding.program.reference import register_reference

__all__ = ["Collective", "Plan", "Reading", "Row", "derive", "make_plan", "read", "register_reference"]
