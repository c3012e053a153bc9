-- Moves the end of leases. ARGV: lease_s, then per lease: rollout id, fence.
-- Reply: ok {lost, cancelled}: rollouts that are no longer the caller's; cancelled ones (all of a deleted job) are nobody's.
local job = read_job()
local lost, cancelled, ends = {}, {}, seconds() + tonumber(ARGV[1])
for i = 2, #ARGV, 2 do
  local rid = ARGV[i]
  if job and call('HGET', FENCES, rid) == ARGV[i + 1] then
    call('ZADD', LEASES, ends, rid)
  else
    local r = load(ROLLOUTS, rid)
    local list = (not job or r and r.state == 'cancelled') and cancelled or lost
    list[#list + 1] = rid
  end
end
return reply('ok', { lost = lost, cancelled = cancelled })
