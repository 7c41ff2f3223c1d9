#include "treeline/schedule.h"

#include "core/check.h"

namespace treeline {

std::string_view Name(Schedule schedule) {
  switch (schedule) {
    case Schedule::kTree:
      return "tree";
    case Schedule::kGather:
      return "gather";
    case Schedule::kTree3:
      return "tree-3";
    case Schedule::kHeads:
      return "heads";
    case Schedule::kTwoLevel:
      return "two-level";
    case Schedule::kRingKv:
      return "ring-kv";
    case Schedule::kRingQ:
      return "ring-q";
    case Schedule::kAuto:
      return "auto";
  }
  return "?";
}

Schedule ParseSchedule(std::string_view name) {
  for (const Schedule schedule : kDecodeSchedules) {
    if (name == Name(schedule)) return schedule;
  }
  if (name == Name(Schedule::kAuto)) return Schedule::kAuto;
  Throw<ArgumentError>("schedule is \"", name,
                       "\"; it must be tree, gather, tree-3, heads, two-level, ring-kv, ring-q or "
                       "auto");
}

}  // namespace treeline
