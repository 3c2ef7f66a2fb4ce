# Runs stages, each under a limit and with a log of its own; gpu_check.sh and gpu_check_many.sh source this file.
#
# They set SCRIPT, NEEDED_GPUS, TOTAL_SECONDS, STAGES, LIMIT and SHOWS, define `run_stages`, which calls `stage NAME` in
# their order, and call `main "$@"`.  What a stage does is in stages.sh.

usage() {
  cat >&2 <<END
usage: bash benchmarks/$SCRIPT OUTDIR $(printf '[%s] ' "${STAGES[@]}")

Without stages: all of them. OUTDIR gets summary.md, logs.tgz, cases.jsonl and measure.json, written anew after each stage.
  GPU_CHECK_TOTAL    seconds that all stages together may take (default: $TOTAL_SECONDS)
  GPU_CHECK_SECONDS  other limits of stages, such as "package=300 pytest=60"
  GPU_CHECK_KIT      the folder that gpu_check/prepare.sh has made (default: .gpu_check in the clone)
  GPU_CHECK_WORK     where is built and installed (default: a folder of yours below TMPDIR)
  GPU_CHECK_COMMIT   the commit of these sources, where neither git nor the kit knows it
  GPU_CHECK_DEVICE   "cpu": a dry run, without a GPU
  GPU_CHECK_CASES    an expression for pytest -k: these cases alone
  MGPU_WHEEL         a wheel to install instead of the kit's; "installed": the package that python3 has
Exit status: 0 no chosen stage failed, 1 one did, 2 a wrong argument, 3 too few GPUs, 130 or 143 stopped by a signal.
END
  exit 2
}

checks=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
root=$(realpath "$checks/../..")
# A kit stays in the folder where prepare.sh has put it, next to the clone that it was made of.
kit=$(realpath -m "${GPU_CHECK_KIT:-$root/.gpu_check}")
work=$(realpath -m "${GPU_CHECK_WORK:-${TMPDIR:-/tmp}/mgpu-gpu-check-$(id -u)}")
device=${GPU_CHECK_DEVICE:-cuda:0}
total=${GPU_CHECK_TOTAL:-$TOTAL_SECONDS}
[[ -z ${MGPU_WHEEL:-} || $MGPU_WHEEL == installed ]] || export MGPU_WHEEL=$(realpath -m "$MGPU_WHEEL")
chosen=() child="" lane="" running="" began=0 gpu="" has_package=yes

is_chosen() { [[ " ${chosen[*]} " == *" $1 "* ]]; }

commit() {
  git -C "$root" describe --always --dirty --exclude '*' 2> /dev/null || cat "$kit/commit" 2> /dev/null || echo "${GPU_CHECK_COMMIT:-unknown}"
}

note() {
  echo "$1 $2 $3 ${LIMIT[$1]}" >> "$work/status"
  echo "[$SECONDS s] $1: ${2//_/ } ($3 s)"
}

# wait_for PID: return the exit status of a child.  In short waits, because a signal that comes just before bash's own
# `wait` blocks is handled when that returns.
wait_for() {
  while kill -0 "$1" 2> /dev/null; do sleep 0.2; done
  wait "$1"
}

# stage NAME: run one stage; return its exit status, or 0 if it was not chosen.
stage() {
  local name=$1 limit=${LIMIT[$1]} code
  is_chosen "$name" || return 0
  ((limit < total - SECONDS)) || limit=$((total - SECONDS))
  if ((limit < 5)); then
    note "$name" not_run 0
    return 1
  fi
  # In the background, because a trap is run after the command in the foreground.
  running=$name began=$SECONDS
  GPU_CHECK_LIMIT=$limit timeout -k 5 "$limit" bash "$checks/stages.sh" "$name" > "$work/logs/$name.log" 2>&1 &
  child=$!
  wait_for "$child"
  code=$?
  child=
  case $code in
    0) note "$name" passed $((SECONDS - began)) ;;
    5) note "$name" missing $((SECONDS - began)) ;;
    6) note "$name" needs_a_GPU $((SECONDS - began)) && code=0 ;;
    124 | 137) note "$name" timed_out $((SECONDS - began)) ;; # at TERM, or only at KILL
    *) note "$name" failed $((SECONDS - began)) ;;
  esac
  [[ -n $lane ]] || publish # the second lane leaves that to the first
  return "$code"
}

# with_package NAME...: run stages that need the package; without one they are noted as not run.
with_package() {
  local name
  for name in "$@"; do
    if [[ $has_package == yes ]]; then
      stage "$name"
    elif is_chosen "$name"; then
      note "$name" not_run 0
    fi
  done
}

# One page: the verdict, the machine, the stages, what failed and why, figures.
summary() {
  local name status seconds limit
  echo "# GPU check: $(verdict)"
  echo
  echo "* commit: $(commit), $(date -u +%F)"
  echo "* GPU, driver: ${gpu//$'\n'/; }"
  grep -hE '^[a-z0-9-]+: ' "$work/logs/facts.log" 2> /dev/null | cut -c 1-150 | sed 's/^/* /'
  printf '\n| stage | what it shows | status | seconds | limit |\n|---|---|---|--:|--:|\n'
  while read -r name status seconds limit; do
    echo "| $name | ${SHOWS[$name]} | ${status//_/ } | $seconds | $limit |"
  done < "$work/status"
  while read -r name status seconds limit; do
    [[ $status == passed || $status == needs_a_GPU || ! -s $work/logs/$name.log ]] && continue
    printf '\n## %s: the end of its log\n\n```\n' "$name"
    tail -n 12 "$work/logs/$name.log" | cut -c 1-300
    echo '```'
  done < "$work/status"
  printf '\n## Tests and figures\n\n'
  for name in "${STAGES[@]}"; do
    grep -hE '^=*[ ]*([0-9]+ (passed|failed|error|skipped)|no test)|^(cases|measure):|SUMMARY|checks passed' "$work/logs/$name.log" 2> /dev/null |
      cut -c 1-200 | sed "s/^/* $name: /"
    sed -nE "s/^(figure: |FAILED |ERROR )/* $name: /p" "$work/logs/$name.log" 2> /dev/null | cut -c 1-300
  done
}

verdict() {
  local good
  good=$(grep -cE ' (passed|needs_a_GPU) ' "$work/status") # a stage that did not run has no such line
  if [[ $good == "${#chosen[@]}" ]]; then echo "passed"; else echo "NOT passed ($good of ${#chosen[@]} stages)"; fi
}

# Few files, whole at any moment: a lost machine loses little.
publish() {
  summary > "$out/summary.md.new"
  mv "$out/summary.md.new" "$out/summary.md"
  tar -czf "$work/logs.new" -C "$work" logs status 2> /dev/null
  [[ -s $work/logs.new ]] && cp "$work/logs.new" "$out/logs.tgz.new" && mv "$out/logs.tgz.new" "$out/logs.tgz"
  cp -f "$work"/cases.jsonl "$work"/measure.json "$out/" 2> /dev/null
}

stop() {
  trap '' TERM INT
  [[ -z ${second:-} ]] || { kill -TERM "$second" 2> /dev/null && wait_for "$second"; }
  if [[ -n $child ]]; then
    kill -TERM "$child" 2> /dev/null # timeout hands it on to all that it started
    wait_for "$child"
    note "$running" stopped $((SECONDS - began))
  fi
  exit "$1"
}

# second_lane FUNCTION: run stages next to those of this lane; `wait_for_second_lane` ends it.
second_lane() {
  (
    lane=second child=""
    trap - EXIT
    trap 'stop 143' TERM
    trap 'stop 130' INT
    "$1"
  ) &
  second=$!
}

wait_for_second_lane() {
  wait_for "$second"
  second=
}

choose() {
  local name
  for name in "$@"; do
    [[ " ${STAGES[*]} " == *" $name "* ]] || usage
  done
  for name in "${STAGES[@]}"; do
    [[ $# == 0 || " $* " == *" $name "* ]] && chosen+=("$name")
  done
}

limits() {
  local each
  [[ $total =~ ^[1-9][0-9]*$ ]] || usage
  for each in ${GPU_CHECK_SECONDS:-}; do
    [[ $each =~ ^([a-z]+)=([1-9][0-9]*)$ && -n ${LIMIT[${BASH_REMATCH[1]}]:-} ]] || usage
    LIMIT[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
  done
}

count_gpus() {
  if [[ $device == cpu ]]; then
    gpu="none: a dry run on the CPU"
    return
  fi
  gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1) && (($(grep -c . <<< "$gpu") >= NEEDED_GPUS)) && return
  echo "$SCRIPT: $NEEDED_GPUS GPU(s) needed here: ${gpu:-nvidia-smi names none}" >&2
  exit 3
}

main() {
  [[ $# -ge 1 && $1 != -* && -n $1 ]] || usage
  out=$(realpath -m "$1")
  choose "${@:2}"
  limits
  count_gpus
  mkdir -p "$out" "$work" && cd "$root" || exit 2
  rm -rf "$work"/{logs,status,cases.jsonl,measure.json} "$out"/{summary.md,logs.tgz,cases.jsonl,measure.json}
  mkdir "$work/logs" && : > "$work/status"
  export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
  export MGPU_CORE_TIMEOUT=${MGPU_CORE_TIMEOUT:-60} MGPU_CORE_CACHE=$work/cache
  export GPU_CHECK_DEVICE=$device GPU_CHECK_WORK=$work GPU_CHECK_KIT=$kit
  MGPU_BENCH_COMMIT=$(commit) && export MGPU_BENCH_COMMIT
  [[ $device != cpu ]] || export MGPU_TEST_DEVICE=cpu
  trap publish EXIT
  trap 'stop 143' TERM
  trap 'stop 130' INT
  run_stages
  cat <(echo) <(summary)
  [[ $(verdict) == passed ]]
  exit
}
