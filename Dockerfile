# flash-lm in a container: docker build -t flash_lm . (or with --build-arg DEVICE=cuda, cuda12 or tpu), then
# docker run -v $PWD:/work flash_lm train --config=quickstart --config.data.path=books
FROM python:3.12-slim
ARG DEVICE=cpu
WORKDIR /opt/flash_lm
COPY pyproject.toml README.md LICENSE ./
COPY flash_lm flash_lm
COPY configs configs
RUN pip install --no-cache-dir ".[${DEVICE},plot,serve]"
RUN useradd --create-home researcher
USER researcher
WORKDIR /work
ENTRYPOINT ["flash-lm"]
