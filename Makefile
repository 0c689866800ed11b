# Two commands: `make paper` regenerates what the profile can, `make test` is the regression suite.
# Both make .venv first when it is missing or out of date. PYTHON=python3.12 chooses another interpreter.

PROFILE ?= demo
JOBS ?= 2
EXTRAS ?= models,images,run,dev
BIN := .venv/bin

.PHONY: paper test install lab clean help

help:
	@echo "make paper    install and regenerate the tables (PROFILE=demo|paper, JOBS=2)"
	@echo "make test     install and run the regression suite"
	@echo "make lab      install and open the notebooks in JupyterLab"
	@echo "make clean    remove runs/ (results can be made again); .venv and weights stay"

.venv/.ready: pyproject.toml constraints.txt workflow/install.sh
	@sh workflow/install.sh "$(EXTRAS)"

install: .venv/.ready

paper: .venv/.ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/histchrono run --profile $(PROFILE) --jobs $(JOBS)

test: .venv/.ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh workflow/test.sh

lab: .venv/.ready
	@$(BIN)/jupyter lab nbs

clean:
	rm -rf runs .snakemake
