#include "cli/machine.h"

#include <hwloc.h>
#include <sched.h>

#include <fstream>
#include <memory>

#include "cli/build_info.h"
#include "treeline/version.h"

namespace treeline::cli {
namespace {

struct DestroyTopology {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Topology = std::unique_ptr<hwloc_topology, DestroyTopology>;

Topology LoadTopology() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  Topology topology(raw);
  if (hwloc_topology_load(raw) != 0) return nullptr;
  return topology;
}

std::string CpuName(hwloc_topology_t topology) {
  const hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
  const char* name = package == nullptr ? nullptr : hwloc_obj_get_info_by_name(package, "CPUModel");
  return name == nullptr ? "unknown" : name;
}

// Cores that this process may run on.
int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace

Machine DescribeMachine() {
  Machine machine;
  machine.cores = UsableCores();
  machine.isas = AttainableIsas();
  machine.version = Version();
  machine.commit = kCommit;
  machine.compiler = kCompiler;
  const Topology topology = LoadTopology();
  if (topology == nullptr) {
    machine.cpu = "unknown";
    return machine;
  }
  machine.cpu = CpuName(topology.get());
  constexpr hwloc_obj_type_t kCaches[] = {HWLOC_OBJ_L1CACHE, HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L3CACHE,
                                          HWLOC_OBJ_L4CACHE};
  for (int level = 1; level <= 4; ++level) {
    const int count = hwloc_get_nbobjs_by_type(topology.get(), kCaches[level - 1]);
    if (count <= 0) continue;
    const hwloc_obj_t cache = hwloc_get_obj_by_type(topology.get(), kCaches[level - 1], 0);
    machine.caches.push_back({level, cache->attr->cache.size, count});
  }
  return machine;
}

}  // namespace treeline::cli
