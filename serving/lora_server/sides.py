"""An engine's ends of processes that compute adapters: of a LoRA Server, of tenants, or of one
process with all adapters.
"""

from serving.lora_server.client import ServerLink
from serving.lora_server.instance import InstanceSide, ServerAccess
from serving.lora_server.shared_side import SharedAccess, SharedLink, SharedSide
from serving.lora_server.tenant_side import TenantAccess, TenantLink, TenantSide

RemoteSide = InstanceSide | TenantSide | SharedSide
RemoteAccess = ServerAccess | TenantAccess | SharedAccess
RemoteLink = ServerLink | TenantLink | SharedLink
