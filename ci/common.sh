# What the scripts share.

# leave_out_proved_tests: pytest runs no file whose imports have not changed since all of CI has passed on it.
leave_out_proved_tests() {
  MGPU_PROVED_TESTS=$(mktemp)
  export MGPU_PROVED_TESTS
  trap 'rm -f "$MGPU_PROVED_TESTS"' EXIT
  python ci/proved_tests.py > "$MGPU_PROVED_TESTS"
  echo "$(wc -l < "$MGPU_PROVED_TESTS") files of tests need not run"
}

# all_proved FOLDER...: whether that holds for all test files in these folders of tests/.
all_proved() {
  local files
  files=$(cd tests && find "$@" -name 'test_*.py') || return 1
  [[ -n $files && -z $(grep -vxFf "$MGPU_PROVED_TESTS" <<< "$files") ]]
}

# readme_command N: the lines of the README's N-th `sh` block, so that it cannot go stale.
readme_command() { awk -v want="$1" '/^```sh$/ {block++; inside=1; next} /^```$/ {inside=0} inside && block == want' README.md; }
