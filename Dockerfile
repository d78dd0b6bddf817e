# flash-lm in a container. A run of FLASH on the sources of Python, on a GPU:
#
#   docker build --build-arg DEVICE=cuda -t flash-lm .
#   docker run --rm --gpus all -v "$PWD/runs:/flash_lm/runs" flash-lm train --config=quickstart --workdir=runs/x
#
# DEVICE is cpu, cuda, cuda12 or tpu. The user has the number 1000: a folder that is mounted must be writable for it.
FROM python:3.12-slim

ARG DEVICE=cpu
RUN useradd --create-home --uid 1000 flash
WORKDIR /flash_lm
COPY . .
# Editable, since flash_lm/configs leads to configs/, whose files `--config` names.
RUN pip install --no-cache-dir -e ".[${DEVICE},plot,serve]" \
    && mkdir runs \
    && chown flash runs .
USER flash
ENTRYPOINT ["flash-lm"]
