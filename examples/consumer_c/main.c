// Attention over keys that lie in two places: each half by itself, then the two results merged. It
// must equal attention over all keys at once. Then one error, to show what a caller sees.
#include <stdio.h>
#include <stdlib.h>
#include <treeline/c_api.h>

enum { kTokens = 100, kHeads = 4, kKvHeads = 2, kDim = 16 };

static float q[kHeads * kDim];
static float k[kTokens * kKvHeads * kDim];
static float v[kTokens * kKvHeads * kDim];

// What attention returns: one row per query head.
typedef struct Rows {
  float out[kHeads * kDim];
  float lse[kHeads];
} Rows;

static treeline_partial AsPartial(Rows* rows) {
  const treeline_partial partial = {
      .out = rows->out, .lse = rows->lse, .rows = kHeads, .v_head_dim = kDim};
  return partial;
}

static void Check(treeline_status status) {
  if (status == TREELINE_OK) return;
  fprintf(stderr, "error %d: %s\n", (int)status, treeline_last_error());
  exit(1);
}

// The query of the last token over the keys [first, first + count).
static void Attend(treeline_context* context, const treeline_spec* spec, int first, int count,
                   Rows* result) {
  const int offset = first * kKvHeads * kDim;
  const treeline_attend_task task = {
      .q = treeline_tensor_dense(q, TREELINE_F32, 1, kHeads, kDim),
      .q_positions = treeline_positions_contiguous(kTokens - 1, 1),
      .kv = treeline_kv_dense(k + offset, v + offset, TREELINE_F32, count, kKvHeads, kDim, kDim),
      .kv_positions = treeline_positions_contiguous(first, count),
      .result = AsPartial(result)};
  Check(treeline_attend(context, spec, &task, 1));
}

static float Largest(float a, float b) { return a > b ? a : b; }

// max |a - b|
static float Difference(const float* a, const float* b, int count) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = Largest(largest, Largest(a[i] - b[i], b[i] - a[i]));
  return largest;
}

// Values from -1 to 1.
static void FillRandom(float* values, int count) {
  for (int i = 0; i < count; ++i) values[i] = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
}

int main(void) {
  FillRandom(q, kHeads * kDim);
  FillRandom(k, kTokens * kKvHeads * kDim);
  FillRandom(v, kTokens * kKvHeads * kDim);

  treeline_context* context = NULL;
  Check(treeline_context_create(TREELINE_ABI_VERSION, /*threads=*/2, /*isa=*/NULL, &context));
  treeline_spec spec;
  Check(treeline_spec_init(&spec, kHeads, kKvHeads, kDim));
  spec.causal = 1;

  Rows all, halves[2], merged;
  Attend(context, &spec, 0, kTokens, &all);
  Attend(context, &spec, 0, kTokens / 2, &halves[0]);
  Attend(context, &spec, kTokens / 2, kTokens - kTokens / 2, &halves[1]);
  const treeline_partial parts[2] = {AsPartial(&halves[0]), AsPartial(&halves[1])};
  const treeline_partial target = AsPartial(&merged);
  Check(treeline_merge(context, parts, 2, &target));

  const float out_error = Difference(merged.out, all.out, kHeads * kDim);
  const float lse_error = Difference(merged.lse, all.lse, kHeads);
  const float part_error = Difference(halves[0].out, all.out, kHeads * kDim);
  printf("treeline %s: two halves merged differ from the whole by %g in out and %g in lse\n",
         treeline_version(), (double)out_error, (double)lse_error);
  printf("(the first half alone differs by %g)\n", (double)part_error);

  spec.kv_heads = 3;
  const treeline_status status = treeline_attend(context, &spec, NULL, 0);
  printf("three key heads for four query heads: error %d, \"%s\"\n", (int)status,
         treeline_last_error());
  treeline_context_destroy(context);

  const int merges = out_error <= 1e-5f && lse_error <= 1e-5f && part_error > 1e-2f;
  return merges && status == TREELINE_ERROR_ARGUMENT ? 0 : 1;
}
