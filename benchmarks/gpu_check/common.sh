# What gpu_check.sh and gpu_check_many.sh share: they set SCRIPT, NEEDED_GPUS, STAGES, LIMIT and SHOWS, and call main.

usage() {
  cat >&2 <<END
usage: bash benchmarks/$SCRIPT OUTDIR $(printf '[%s] ' "${STAGES[@]}")

Without stages: all of them, in this order.
  MGPU_WHEEL             a wheel that is installed instead of building one
  GPU_CHECK_WORK         where is built and installed (default: a folder of yours below TMPDIR)
  GPU_CHECK_SECONDS      other limits, such as "build=300 test=60"
  GPU_CHECK_COMMIT       the commit of these sources, where git does not know it
Exit status: 0 all chosen stages passed, 1 one did not, 2 a wrong argument, 3 too few GPUs, 130 or 143 stopped by a signal.
END
  exit 2
}

readonly FACTS_SECONDS=20
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
work=$(realpath -m "${GPU_CHECK_WORK:-${TMPDIR:-/tmp}/mgpu-gpu-check-$(id -u)}")
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
[[ -z ${MGPU_WHEEL:-} ]] || MGPU_WHEEL=$(realpath -m "$MGPU_WHEEL")

# One page: the verdict, the machine, the stages and the ends of the logs of those that did not pass; figures below.
summary() {
  local stage status rest
  {
    echo "# GPU check: $(verdict)"
    echo
    cat "$out/facts.md" 2>/dev/null
    bounds
    printf '\n| stage | what it shows | status | seconds | limit |\n|---|---|---|--:|--:|\n'
    while read -r stage status rest; do
      echo "| $stage | ${SHOWS[$stage]} | ${status//_/ } | $rest | ${LIMIT[$stage]} |"
    done < "$out/status"
    while read -r stage status rest; do
      [[ $status == passed || ! -s $out/$stage.log ]] && continue
      printf '\n## %s: the end of its log\n\n```\n' "$stage"
      tail -n 12 "$out/$stage.log" | cut -c 1-300
      echo '```'
    done < "$out/status"
    figures
  } > "$out/summary.md.new" && mv "$out/summary.md.new" "$out/summary.md"
}

# Of all that was chosen: what has no line in `status` has not run.
verdict() {
  local passed
  passed=$(grep -c ' passed ' "$out/status")
  if [[ $passed == "${#chosen[@]}" ]]; then echo passed; else echo "NOT passed ($passed of ${#chosen[@]} stages)"; fi
}

bounds() {
  [[ -s $out/bench.log ]] || return 0
  local held missed
  held=$(grep -c '^\* held' "$out/bench.log")
  missed=$(grep -c '^\* MISSED' "$out/bench.log")
  echo "* bounds: $held held, $missed missed (figures to look at; they fail nothing)"
}

figures() {
  local stage
  printf '\n## Tests and figures\n\n'
  for stage in "${STAGES[@]}"; do
    grep -hE '^=*[ ]*([0-9]+ (passed|failed|error|skipped)|no test)|SUMMARY|checks passed' "$out/$stage.log" 2>/dev/null |
      sed "s/^/* $stage: /"
    [[ $stage == bench ]] || sed -n "s/^figure: /* $stage: /p" "$out/$stage.log" 2>/dev/null
  done
  [[ -s $out/bench.log ]] || return 0
  printf '\n## Kernels (ms; how many times as long each peer took)\n\n'
  awk '/^== / { print "* " substr($0, 4) }
    /^(device cuda|\* (held|MISSED|not measured)|run.py: error|not run)/ { sub(/^\* /, ""); print "  * " $0 }' "$out/bench.log"
}

# What doctor says is asked once, by way of the package: it is the one that the results belong to.
facts() {
  timeout "$FACTS_SECONDS" python3 -P -m mgpu_core doctor --json > "$out/doctor.json" 2> "$out/doctor.log"
  {
    echo "* commit: $(git describe --always --dirty --exclude '*' 2>/dev/null || echo "${GPU_CHECK_COMMIT:-unknown}")"
    echo "* GPU, driver: ${gpu//$'\n'/; }"
    python3 -c '
import json, sys
report = json.load(sys.stdin)
for name in ("torch", "nccl", "python"):
    print(f"* {name}:", (report[name] or {}).get("version"))
print("* CUDA:", report["torch"]["cuda"])
print("* mgpu_core:", report["mgpu_core"])
' < "$out/doctor.json" 2>> "$out/doctor.log"
  } > "$out/facts.md"
}

note() {
  echo "$1 $2 $3" >> "$out/status"
  echo "$1: ${2//_/ } ($3 s)"
  summary
}

# In the background, because a trap waits for a command in the foreground.
run_stage() {
  local stage=$1 begin=$SECONDS code
  GPU_CHECK_LIMIT=${LIMIT[$stage]} timeout -k 5 "${LIMIT[$stage]}" \
    bash benchmarks/gpu_check/stage.sh "$stage" "$out" "$work" > "$out/$stage.log" 2>&1 &
  child=$! running=$stage started=$begin
  wait "$child"
  code=$?
  child=
  case $code in
    0) note "$stage" passed $((SECONDS - begin)) ;;
    124 | 137) note "$stage" timed_out $((SECONDS - begin)) ;; # at TERM, or only at KILL
    5) note "$stage" missing $((SECONDS - begin)) ;;
    *) note "$stage" failed $((SECONDS - begin)) ;;
  esac
  return "$code"
}

stop() {
  trap '' TERM INT
  if [[ -n $child ]]; then
    kill -TERM "$child" 2>/dev/null # timeout hands it on to all that it started
    wait "$child"
    note "$running" stopped $((SECONDS - started))
  fi
  exit "$1"
}

too_few_gpus() {
  echo "$SCRIPT: ${NEEDED_GPUS} GPU(s) needed here: ${gpu:-nvidia-smi names none}" | tee "$out/facts.md" >&2
  exit 3
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
  for each in ${GPU_CHECK_SECONDS:-}; do
    [[ $each =~ ^([a-z]+)=([1-9][0-9]*)$ && -n ${LIMIT[${BASH_REMATCH[1]}]:-} ]] || usage
    LIMIT[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
  done
}

main() {
  local stage code=0
  [[ $# -ge 1 && $1 != -* && -n $1 ]] || usage
  out=$(realpath -m "$1")
  choose "${@:2}"
  limits
  mkdir -p "$out" "$work" && cd "$root" || exit 2
  rm -rf "$out"/{status,summary.md,facts.md,doctor.json,results,*.log,test-*.xml}
  : > "$out/status"
  trap summary EXIT
  trap 'stop 143' TERM
  trap 'stop 130' INT
  gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1) || too_few_gpus
  (($(grep -c . <<< "$gpu") >= NEEDED_GPUS)) || too_few_gpus
  [[ " ${chosen[*]} " == *" build "* ]] || facts
  for stage in "${chosen[@]}"; do
    # Without a package only the sanitizer has work: it builds its program itself.
    if [[ $usable == no && $stage != sanitize ]]; then
      note "$stage" not_run 0
      continue
    fi
    run_stage "$stage" || code=1
    [[ $stage == build && $code == 1 ]] && usable=no
    [[ $stage == build ]] && facts
  done
  exit "$code"
}

chosen=() child="" running="" started=0 gpu="" usable=yes
