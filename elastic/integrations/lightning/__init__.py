"""Lightning's Trainer and Fabric in an elastic job. Importing this package registers ``strategy="elastic"``."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from elastic.integrations.lightning.fabric import ElasticFabricStrategy as ElasticFabricStrategy
from elastic.integrations.lightning.strategy import ElasticStrategy as ElasticStrategy

__all__ = ["ElasticFabricStrategy", "ElasticStrategy"]

ElasticStrategy.register_strategies(StrategyRegistry)
ElasticFabricStrategy.register_strategies(STRATEGY_REGISTRY)
