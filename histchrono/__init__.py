"How well AI models keep history straight: ChronoScope and Synthetic History as one compendium."

__version__ = "0.1.0"
